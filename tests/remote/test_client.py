"""Objects of web servers and object stores: read and written, and what is said when that fails."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import traceback
import zlib
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from child_processes import child_environment

import fastload.remote.client
from fastload.errors import (
    AccessError,
    FileChangedError,
    ForkError,
    MissingExtraError,
    MissingFileError,
    ObjectExistsError,
    ObjectMissingError,
    OptionError,
    RemoteError,
    ReplacedError,
)
from fastload.remote.backend import Failure
from fastload.remote.client import Client, open_client
from fastload.remote.filesystems import _object
from fastload.remote.urls import Remote

SHORT = Remote(timeout=0.3, give_up_after=0.6)
DATA = random.Random(0).randbytes(100_000)


def whole(client: Client, key: str) -> memoryview:
    return client.read(key, 0, client.head(key).num_bytes)


@pytest.fixture(params=["http", "s3", "memory", "file"])
def written(request, tmp_path):
    """An object DATA, by each kind of client: the client and its key."""
    if request.param == "s3":
        request.getfixturevalue("s3").put("a/b c#%.bin", DATA)
        url = "s3://bucket/a/b c#%.bin"
    elif request.param == "http":
        server = request.getfixturevalue("range_server")
        (server.folder / "a").mkdir()
        (server.folder / "a" / "b c#%.bin").write_bytes(DATA)
        url = f"{server.url}/a/b%20c%23%25.bin"
    elif request.param == "memory":
        url = f"memory://{tmp_path.name}/a/b.bin"
    else:
        url = f"file://{tmp_path}/a/b.bin"
    client, key = open_client(url, Remote(give_up_after=5))
    with client:
        if request.param in ("memory", "file"):
            client.put(key, DATA)
        yield client, key


@pytest.fixture
def served(range_server):
    """An object DATA on the server of ranges, with short limits: the client, its key, and the server."""
    (range_server.folder / "x.bin").write_bytes(DATA)
    client, key = open_client(f"{range_server.url}/x.bin?X-Amz-Signature=hidden", SHORT)
    with client:
        yield client, key, range_server


def test_ranges_are_read_exactly(written) -> None:
    client, key = written
    for first, stop in ((0, 1), (0, len(DATA)), (99_999, 100_000), (17, 4711), (5, 5)):
        assert client.read(key, first, stop) == DATA[first:stop]


def test_an_object_is_read_whole_with_its_etag(written) -> None:
    client, key = written
    data, info = client.read_range(key, 0, len(DATA))
    assert data == DATA and data.readonly
    assert info == client.head(key) and info.num_bytes == len(DATA) and info.etag
    assert client.read(key, 3, 9, etag=info.etag) == DATA[3:9]
    assert client.holding(key, DATA) == info
    assert client.holding(key, DATA[:-1] + b"?") is None and client.holding(key, DATA[1:]) is None
    assert client.counts.bytes >= len(DATA) + 6


def test_a_range_behind_the_end_is_an_error_at_once(written) -> None:
    client, key = written
    for first, stop in ((99_999, 100_001), (200_000, 200_001)):
        with pytest.raises(RemoteError, match=r"asked for bytes .* without success"):
            client.read(key, first, stop)
    assert client.counts.retries == 0


def test_a_missing_object_is_named_at_once(written) -> None:
    client, key = written
    for ask in (client.head, lambda key: client.read(key, 0, 1)):
        with pytest.raises(ObjectMissingError, match=r"nothing\.h5: there is no such object") as caught:
            ask(f"{key}/nothing.h5")
        assert isinstance(caught.value, MissingFileError | FileNotFoundError)
    assert client.counts.retries == 0


def test_a_replaced_object_is_noticed(written, request, tmp_path) -> None:
    client, key = written
    etag = client.head(key).etag
    if client.url.startswith("http"):
        request.getfixturevalue("range_server").set(etag="-2")
    else:
        client.put(key, DATA[::-1])
    with pytest.raises(ReplacedError, match="replaced while in use") as caught:
        client.read(key, 0, 10, etag=etag)
    assert isinstance(caught.value, FileChangedError)
    assert client.counts.retries == 0


def test_a_server_that_ignores_if_match_does_not_hide_a_replaced_object(served) -> None:
    client, key, server = served
    etag = client.head(key).etag
    server.set(etag="-2", ignores_if_match=True)
    with pytest.raises(ReplacedError):
        client.read(key, 0, 10, etag=etag)


def test_a_server_without_ranges_is_an_error(served) -> None:
    client, key, server = served
    server.set(ignores_ranges=True)
    with pytest.raises(RemoteError, match="does not serve ranges"):
        client.read(key, 5, 10)


@pytest.mark.parametrize("url", ["s3://bucket/", "memory://listed/", "file://"])
def test_a_list_has_every_key_below_a_prefix(url, request, tmp_path) -> None:
    if url.startswith("s3"):
        request.getfixturevalue("s3")
    client, root = open_client(f"{url}{tmp_path}/" if url == "file://" else url)
    names = [f"{root}deep/{i % 3}/{i}" for i in range(40)] + [f"{root}deeper"]
    for name in names:
        client.put(name, name.encode())
    assert [item.key for item in client.list(f"{root}deep")] == sorted(names)
    assert [item.key for item in client.list(f"{root}deep/")] == sorted(names)[:-1]
    assert [item.key for item in client.list(f"{root}deep/2/1")] == sorted(n for n in names if "deep/2/1" in n)
    assert [*client.list(f"{root}other/")] == []
    item = next(client.list(f"{root}deep/0/0"))
    assert item == client.head(f"{root}deep/0/0")


def test_a_list_of_several_pages_is_whole(s3) -> None:
    from moto.s3.models import s3_backends  # a request for each would take moto seconds

    for i in range(1100):
        s3_backends["123456789012"]["aws"].put_object(s3.bucket, f"many/{i:05}", b"")
    client, _ = open_client(s3.url)
    assert [item.key for item in client.list("many/")] == [f"many/{i:05}" for i in range(1100)]


def test_a_list_goes_on_behind_a_page_that_failed(s3, monkeypatch) -> None:
    client, _ = open_client(s3.url)
    for i in range(6):
        client.put(f"x/{i}", b"")
    pages, asked = client._backend.pages, []

    def failing(prefix, after):
        asked.append(after)
        for item in [item for page in pages(prefix, after) for item in page]:
            if item.key == "x/4" and len(asked) < 3:
                raise Failure("broken", "as the test says")
            yield [item]

    monkeypatch.setattr(client._backend, "pages", failing)
    assert [item.key for item in client.list("x/")] == [f"x/{i}" for i in range(6)]
    assert asked == ["", "x/3", "x/3"]


def test_a_web_server_has_no_list(served) -> None:
    with pytest.raises(RemoteError, match="no list"):
        next(served[0].list())


@pytest.fixture(params=["s3", "memory", "file"])
def empty(request, tmp_path):
    """A client of a place without objects, and a key there."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    url = {"s3": "s3://bucket", "memory": f"memory://{tmp_path.name}-empty", "file": f"file://{tmp_path}"}
    client, key = open_client(f"{url[request.param]}/new/object.bin", Remote(give_up_after=5))
    with client:
        yield client, key


def test_an_object_is_created_once_only(empty) -> None:
    client, key = empty
    etag = client.put(key, b"first", only_if="absent")
    with pytest.raises(ObjectExistsError, match="already"):
        client.put(key, b"second", only_if="absent")
    assert whole(client, key) == b"first" and client.head(key).etag == etag


def test_an_object_is_replaced_only_as_it_was(empty) -> None:
    client, key = empty
    first = client.put(key, b"first")
    second = client.put(key, memoryview(b"second"), only_if=first)
    assert second != first
    with pytest.raises(ReplacedError):
        client.put(key, b"third", only_if=first)
    assert whole(client, key) == b"second"


# Not on S3: there the server decides, and moto compares and writes in two steps, so that of eight threads two may win.
@pytest.mark.parametrize("empty", ["file"], indirect=True)
def test_one_of_many_threads_creates_an_object(empty) -> None:
    client, key = empty

    def create(i: int) -> bool:
        try:
            client.put(key, b"%d" % i, only_if="absent")
        except ObjectExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(create, range(8))) == 1


def test_an_upload_shows_nothing_before_it_is_finished(empty) -> None:
    client, key = empty
    part = random.Random(1).randbytes(3 * 2**20)
    with client.upload(key, part_bytes=5 * 2**20) as upload:
        for _ in range(2):
            upload.write(part)
        with pytest.raises(ObjectMissingError):
            client.head(key)
        assert [item.key for item in client.list(key)] == []
        etag = upload.finish()
    assert whole(client, key) == part * 2 and client.head(key).etag == etag
    with pytest.raises(RemoteError, match="ended"):
        upload.write(b"more")


def test_an_upload_that_fails_leaves_nothing(empty, request, tmp_path) -> None:
    client, key = empty
    with pytest.raises(ZeroDivisionError), client.upload(key, part_bytes=5 * 2**20) as upload:
        for _ in range(3):
            upload.write(bytes(4 * 2**20))
        raise ZeroDivisionError
    with client.upload(key) as upload:
        upload.write(b"and left without finish")
    assert [*client.list(key.rpartition("/")[0])] == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    if client.url.startswith("s3"):
        s3 = request.getfixturevalue("s3")
        assert "Uploads" not in s3.boto3.list_multipart_uploads(Bucket=s3.bucket)


@pytest.mark.parametrize("written", ["s3", "memory", "file"], indirect=True)
def test_a_deleted_object_is_gone_and_may_be_deleted_again(written) -> None:
    client, key = written
    client.delete(key)
    client.delete(key)
    with pytest.raises(ObjectMissingError):
        client.head(key)


def test_refused_access_is_named_at_once(s3) -> None:
    s3.put("x", DATA)
    client, key = open_client("s3://bucket/x", Remote(give_up_after=60))
    s3.refuse()
    for ask in (client.head, lambda key: client.put(key, b"")):
        with pytest.raises(AccessError, match=r"s3://bucket/x: access was refused .*403.*AWS_PROFILE"):
            ask(key)
    with pytest.raises(AccessError), client.upload(key) as upload:
        upload.write(b"more")
        upload.finish()
    assert client.counts.retries == 0


def test_another_region_is_named_at_once(served, s3, monkeypatch) -> None:
    _, _, server = served
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    server.set(status=301, code="PermanentRedirect")
    client, key = open_client("s3://bucket/x", Remote(give_up_after=60))
    with pytest.raises(RemoteError, match="set AWS_REGION"):
        client.read(key, 0, 1)
    assert client.counts.retries == 0


def test_without_credentials_the_variables_are_named(s3, monkeypatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    # Instead of the address at which a machine of AWS asks for its role.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    client, key = open_client("s3://bucket/x", Remote(give_up_after=60))
    with pytest.raises(AccessError, match=r"no credentials were found.*AWS_SKIP_SIGNATURE=true"):
        client.read(key, 0, 1)


def test_a_written_object_is_ours_when_only_the_answer_was_lost(s3, monkeypatch) -> None:
    client, key = open_client("s3://bucket/claim", Remote(give_up_after=60))
    put, tries = client._backend.put, []

    def losing(*given):
        tries.append(put(*given))
        raise Failure("timeout", "as the test says")

    monkeypatch.setattr(client._backend, "put", lambda *given: put(*given) if tries else losing(*given))
    assert client.put(key, b"mine", only_if="absent") == tries[0]
    del tries[:]
    with pytest.raises(ObjectExistsError):
        client.put(key, b"another's", only_if="absent")


@pytest.mark.parametrize("status", [400, 403])
def test_expired_credentials_are_looked_for_again_and_then_named(served, status, s3, monkeypatch) -> None:
    _, _, server = served
    (server.folder / "bucket").mkdir()
    (server.folder / "bucket" / "x").write_bytes(DATA)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    client, key = open_client("s3://bucket/x", SHORT)
    server.set(status=status, code="ExpiredToken")
    with pytest.raises(AccessError, match="credentials have expired"):
        client.read(key, 0, 1)
    assert client.counts.requests == 2


def test_an_unknown_host_and_a_closed_port_are_named() -> None:
    for host, why in (("no-such-host.invalid", "the host is unknown"), ("127.0.0.1:1", "refused")):
        client, key = open_client(f"http://{host}/x", SHORT)
        with pytest.raises(
            RemoteError, match=rf"http://{host}/x: .* time.*no connection: .*{why}.*the name of the host"
        ):
            client.head(key)


def test_a_host_that_never_answered_is_given_up_sooner(monkeypatch, caplog) -> None:
    monkeypatch.setattr(fastload.remote.client, "FIRST_ANSWER_S", 0.5)
    monkeypatch.setattr(fastload.remote.client, "WARNED_AFTER_S", 0.0)
    client, key = open_client("http://127.0.0.1:1/x?hidden", Remote(give_up_after=3600))
    with pytest.raises(RemoteError, match="no connection"):
        client.head(key)
    assert "http://127.0.0.1:1/x: a request fails for" in caplog.text and "hidden" not in caplog.text
    assert len(caplog.records) == 1, "one warning, not one for each try"


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"status": 503}, "HTTP status 503.*in_flight"),
        ({"status": 429, "code": "TooMany"}, "HTTP status 429 TooMany"),
        ({"status": 500, "code": "InternalError"}, "HTTP status 500"),
        ({"cut": 1.0}, "broke off|the connection failed"),
        ({"stalled": 1.0}, "within the timeout.*timeout="),
        ({"latency_s": 60.0}, "within the timeout"),
    ],
)
def test_it_gives_up_and_says_what_was_tried(served, faults, reason) -> None:
    client, key, server = served
    server.set(**faults)
    with pytest.raises(
        RemoteError, match=rf"x.bin: asked for bytes 0 to 9 of it \d+ times in .*s, without success.*{reason}"
    ):
        client.read(key, 0, 10)
    assert client.counts.retries >= 1


def test_every_byte_comes_through_a_server_that_fails(range_server) -> None:
    (range_server.folder / "x.bin").write_bytes(DATA)
    client, key = open_client(f"{range_server.url}/x.bin", Remote(timeout=0.3, give_up_after=60, in_flight=8))
    range_server.set(refused=0.2, cut=0.1, stalled=0.02)
    spans = [(i * 500, (i + 1) * 500) for i in range(200)]
    with client, ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda span: bytes(client.read(key, *span)), spans))
    assert b"".join(parts) == DATA
    assert client.counts.throttled and client.counts.retries > client.counts.throttled


def test_no_more_requests_at_once_than_in_flight(range_server) -> None:
    (range_server.folder / "x.bin").write_bytes(DATA)
    client, key = open_client(f"{range_server.url}/x.bin", Remote(in_flight=4))
    range_server.set(latency_s=0.005)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: client.read(key, 0, 10), range(100)))
    assert range_server.most_at_once() == 4


def test_close_ends_the_waits_of_other_threads(range_server) -> None:
    (range_server.folder / "x.bin").write_bytes(DATA)
    client, key = open_client(f"{range_server.url}/x.bin", Remote(give_up_after=3600))
    range_server.set(status=503)
    raised = []

    def read() -> None:
        try:
            client.read(key, 0, 1)
        except RemoteError as error:
            raised.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    while client.counts.retries < 3:
        pass
    client.close()
    reading.join()
    assert "was closed" in str(raised[0])


def test_a_fork_gets_an_error_that_says_what_to_do_instead(served) -> None:
    client, key, server = served
    client.head(key)

    def raises(work) -> bool:
        try:
            work()
        except ForkError as error:
            return "spawn or forkserver" in str(error)
        return False

    child = os.fork()
    if child == 0:
        signal.alarm(20)  # instead of hanging for ever
        good = raises(lambda: client.read(key, 0, 1)) and raises(lambda: open_client(f"{server.url}/x.bin"))
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.read(key, 0, 1) == DATA[:1]


def test_a_fork_of_a_process_without_clients_opens_its_own(range_server, tmp_path) -> None:
    (range_server.folder / "x.bin").write_bytes(DATA)
    script = tmp_path / "fork.py"
    script.write_text(
        "import os, signal, sys\n"
        "import fastload.remote.client as remote\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(20)\n"
        "    client, key = remote.open_client(sys.argv[1])\n"
        "    os._exit(0 if len(client.read(key, 0, 10)) == 10 else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    command = [sys.executable, str(script), f"{range_server.url}/x.bin"]
    subprocess.run(command, env=child_environment(), check=True, timeout=120)


def test_secrets_are_in_nothing_that_is_shown_or_kept(range_server, s3, monkeypatch, caplog) -> None:
    for name, value in (("ID", "hidden-id"), ("SECRET", "hidden-secret")):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID" if name == "ID" else "AWS_SECRET_ACCESS_KEY", value)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "hidden-token")
    monkeypatch.setenv("AWS_ENDPOINT_URL", range_server.url)
    address = range_server.url.removeprefix("http://")
    for url in (f"http://me:hidden-pw@{address}/x?X-Amz-Signature=hidden-query#hidden-part", "s3://bucket/x"):
        client, key = open_client(url, SHORT)
        texts = [repr(client), str(client), client.url, client.url_of(key), repr(client.counts), repr(client.remote)]
        texts.append(repr(pickle.dumps(client.remote)))
        for faults in ({}, {"status": 403}, {"status": 503}, {"status": 400, "code": "ExpiredToken"}, {"cut": 1.0}):
            range_server.set(**faults)
            with pytest.raises(RemoteError) as caught:
                client.read(key, 0, 10)
            texts += traceback.format_exception(caught.value)
            texts.append(repr(pickle.dumps(caught.value)))
            assert caught.value.__context__ is None and caught.value.__cause__ is None
        with pytest.raises(TypeError, match="cannot be pickled") as refused:
            pickle.dumps(client)
        texts.append(str(refused.value))
    assert not [text for text in [*texts, caplog.text] if "hidden" in text]


def test_the_query_of_a_url_is_sent_with_every_request(range_server) -> None:
    """The server drops queries: that it is asked for the right file is all there is to see here."""
    (range_server.folder / "x.bin").write_bytes(DATA)
    client, key = open_client(f"{range_server.url}/x.bin?token=a/b", SHORT)
    assert key == "x.bin" and client.read(key, 0, 3) == DATA[:3]


PROFILE = "[default]\naws_access_key_id = profile-key\naws_secret_access_key = profile-secret\n"


@pytest.fixture
def profile(s3, monkeypatch, tmp_path):
    """Credentials in a profile only."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(PROFILE)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    s3.put("x", DATA)
    return s3


def test_a_profile_is_read_by_boto3(profile) -> None:
    client, key = open_client("s3://bucket/x")
    assert client.read(key, 0, 10) == DATA[:10]


def test_a_profile_without_boto3_is_an_error_that_says_so(profile, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "boto3"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(MissingExtraError, match=r"profile 'default' in ~/.aws.*pip install boto3"):
        open_client("s3://bucket/x")


def test_a_profile_that_is_not_there_is_named(profile, monkeypatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(AccessError, match="'other'"):
        open_client("s3://bucket/x")


def test_without_obstore_the_extra_is_named(monkeypatch) -> None:
    for name in ("obstore", "obstore.store", "obstore.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"fastload-hdf5\[cloud\]"):
        open_client("s3://bucket/x")


def test_what_cannot_be_opened_is_said() -> None:
    with pytest.raises(OptionError, match="is no URL"):
        open_client("a/file.h5")
    with pytest.raises(OptionError, match="no scheme that is known"):
        open_client("nonsense://a/file.h5")
    with pytest.raises(OptionError, match=r"http://\[bad/x: this is no URL"):
        open_client("http://me:pw@[bad/x")
    with pytest.raises(RemoteError, match=r"ftp://127\.0\.0\.1:1: no connection"):
        open_client("ftp://127.0.0.1:1/x.h5")
    client, _ = open_client("http://127.0.0.1:1/x", SHORT)
    with pytest.raises(RemoteError, match="no valid key"):
        client.head("a/../b")


def test_an_endpoint_without_a_scheme_is_said(s3, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9")
    with pytest.raises(OptionError, match="AWS_ENDPOINT_URL: the variable holds no URL"):
        open_client("s3://bucket/x")


@pytest.mark.parametrize("url", ["s3://bucket/x.h5?X-Amz-Signature=hidden", "az://box/x.h5?sv=1&sig=hidden"])
def test_a_signature_where_none_is_read_is_refused_and_not_shown(url) -> None:
    with pytest.raises(OptionError, match="this URL comes with a signature") as caught:
        open_client(url)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("key", ["a//0.jpg", "a/../0.jpg"])
def test_a_key_that_cannot_be_read_ends_a_list_at_once_with_its_name(s3, key) -> None:
    s3.boto3.put_object(Bucket=s3.bucket, Key=f"odd/{key}", Body=b"x")
    client, prefix = open_client(f"{s3.url}/odd/")
    with client, pytest.raises(RemoteError, match=f"key 'odd/{key}' has an empty part"):
        list(client.list(prefix))


def test_the_time_of_a_file_is_part_of_its_etag() -> None:
    infos = [{"size": 1, "LastModified": f"{year}-01-01T00:00:00+00:00"} for year in (2024, 2025)]
    assert len({_object("x", info).etag for info in infos}) == 2


class Generations(BaseHTTPRequestHandler):
    """One object, as Google Cloud Storage keeps it: what replaces it names its generation."""

    objects: ClassVar[dict[str, tuple[int, bytes]]] = {}

    def answer(self, status: int, data: bytes = b"", *, head: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if data:
            generation = self.objects[self.path][0]
            self.send_header("ETag", f'"{zlib.crc32(data):x}"')
            self.send_header("x-goog-generation", str(generation))
            self.send_header("Last-Modified", "Wed, 21 Oct 2026 07:28:00 GMT")
        self.end_headers()
        if not head:
            self.wfile.write(data)

    def do_HEAD(self) -> None:
        found = self.objects.get(self.path)
        self.answer(200 if found else 404, found[1] if found else b"", head=True)

    def do_PUT(self) -> None:
        data, there = self.rfile.read(int(self.headers["Content-Length"])), self.objects.get(self.path, (0, b""))
        wanted = self.headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != there[0]:
            return self.answer(412)
        self.objects[self.path] = there[0] + 1, data
        self.answer(200, data, head=True)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_google_replaces_an_object_only_as_it_was(tmp_path, monkeypatch) -> None:
    Generations.objects.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Generations)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    account = {"gcs_base_url": f"http://127.0.0.1:{server.server_port}", "disable_oauth": True, "client_email": ""}
    (tmp_path / "account.json").write_text(json.dumps(account | {"private_key": "", "private_key_id": ""}))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    client, key = open_client("gs://bucket/x.h5", SHORT)
    with client:
        client.put(key, b"one", only_if="absent")
        with pytest.raises(ObjectExistsError):
            client.put(key, b"two", only_if="absent")
        etag = client.head(key).etag
        client.put(key, b"two", only_if=etag)
        assert client.head(key).num_bytes == 3 and [*Generations.objects.values()] == [(2, b"two")]
        with pytest.raises(ReplacedError):
            client.put(key, b"three", only_if=etag)
    server.shutdown()
    server.server_close()


def test_no_torch_is_imported(tmp_path) -> None:
    script = tmp_path / "imports.py"
    script.write_text(
        "import sys, fastload.remote.client\nassert not {'torch', 'obstore', 'fsspec'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, str(script)], env=child_environment(), check=True, timeout=120)
    assert fastload.remote.client.open_client
