"""Servers that send more than was asked for, change bytes on their way, or redirect to other servers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from child_processes import child_environment
from running_server import RangeServer, serving

from fastload.errors import AccessError, RemoteError
from fastload.remote.backend import Failure
from fastload.remote.client import open_client
from fastload.remote.cloud import failure_of, guard, moved_to
from fastload.remote.urls import Remote

DATA = bytes(range(256)) * 400
SHORT = Remote(timeout=2, give_up_after=0.3)


@pytest.fixture
def other(range_server, tmp_path):
    """A server of another host, of the same file x.bin."""
    with serving(tmp_path / "elsewhere", "127.0.0.2") as server:
        for one in (range_server, server):
            (one.folder / "x.bin").write_bytes(DATA)
        yield server


def secrets_in(server: RangeServer) -> list[str]:
    return [f"{one['query']} {one['secrets']}" for one in server.log() if one["query"] or one["secrets"]]


@pytest.mark.parametrize("endless", ["close", "chunked", "length"])
def test_an_answer_without_end_takes_no_memory_beyond_what_was_asked_for(endless, range_server, tmp_path):
    (range_server.folder / "x.bin").write_bytes(bytes(2**20))
    script = tmp_path / "read.py"
    script.write_text(
        "import resource, sys\n"
        "from fastload.errors import RemoteError\n"
        "from fastload.remote.client import open_client\n"
        "from fastload.remote.urls import Remote\n"
        "import urllib.request, json\n"
        "client, key = open_client(sys.argv[1] + '/x.bin', Remote(timeout=2, give_up_after=0.3))\n"
        "client.read(key, 0, 4096)\n"
        "urllib.request.urlopen(sys.argv[1] + '/control', json.dumps({'endless': sys.argv[2]}).encode()).read()\n"
        "most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = most()\n"
        "try:\n"
        "    client.read(key, 0, 4096)\n"
        "except RemoteError:\n"
        "    print(most() - before)\n"
    )
    command = [sys.executable, str(script), range_server.url, endless]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) <= 2**20 + 4096


def test_a_web_server_is_followed_to_another_host_without_user_query_and_referer(range_server, other):
    range_server.set(redirects={"/x.bin": f"{other.url}/x.bin"})
    url = range_server.url.replace("//", "//user:hidden@")
    client, key = open_client(f"{url}/x.bin?X-Amz-Signature=hidden", SHORT)
    with client:
        assert client.head(key).num_bytes == len(DATA)
        assert client.read(key, 5, 4711) == DATA[5:4711]
    assert len(secrets_in(range_server)) > 1
    assert {one["method"] for one in other.log()} == {"HEAD", "GET"} and not secrets_in(other)


def test_what_was_signed_by_the_server_that_redirects_is_asked_for_again_when_it_has_expired(range_server, other):
    range_server.set(redirects={"/x.bin": f"{other.url}/old.bin?sig=1"})
    (other.folder / "old.bin").write_bytes(DATA)
    client, key = open_client(f"{range_server.url}/x.bin", SHORT)
    with client:
        assert client.read(key, 0, 9) == DATA[:9]
        (other.folder / "old.bin").rename(other.folder / "new.bin")
        range_server.set(redirects={"/x.bin": f"{other.url}/new.bin?sig=2"})
        assert client.read(key, 0, 9) == DATA[:9]
    assert [one["query"] for one in other.log() if one["method"] == "GET"] == ["sig=1", "sig=1", "sig=2"]


def test_redirects_are_bounded_and_never_leave_https(range_server, other):
    range_server.set(redirects={"/x.bin": f"{other.url}/y.bin"})
    other.set(redirects={"/y.bin": f"{range_server.url}/x.bin"})
    client, key = open_client(f"{range_server.url}/x.bin", SHORT)
    with pytest.raises(RemoteError, match="redirects more than 5 times"):
        client.head(key)
    assert len(range_server.log()) < 10
    range_server.set(redirects={"/x.bin": "file:///etc/passwd"})
    with pytest.raises(RemoteError, match="no URL of a web server"):
        moved_to_or_raise(f"{range_server.url}/x.bin")


def moved_to_or_raise(url: str) -> str:
    try:
        return moved_to(url, 2)
    except Failure as failure:
        raise RemoteError(failure.reason) from failure


def test_a_redirect_from_https_to_http_is_refused(monkeypatch):
    monkeypatch.setattr("fastload.remote.cloud._location", lambda *_, **__: "http://127.0.0.2/x")
    with pytest.raises(RemoteError, match="https:// to http://"):
        moved_to_or_raise("https://127.0.0.1/x")


@pytest.mark.parametrize("url", ["s3://bucket/x.bin", "gs://bucket/x.bin", "az://bucket/x.bin"])
def test_a_store_is_followed_to_no_other_host(url, range_server, other, monkeypatch, tmp_path):
    account = tmp_path / "account.json"
    account.write_text(f'{{"gcs_base_url": "{range_server.url}", "disable_oauth": true, "private_key": "", '
                       f'"private_key_id": "", "client_email": ""}}')  # fmt: skip
    for name, value in {
        "AWS_ENDPOINT_URL": range_server.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "hidden",
        "AWS_SESSION_TOKEN": "hidden", "AWS_REGION": "us-east-1", "GOOGLE_SERVICE_ACCOUNT": str(account),
        "AZURE_STORAGE_ENDPOINT": range_server.url, "AZURE_STORAGE_ACCOUNT_NAME": "a",
        "AZURE_STORAGE_ACCOUNT_KEY": "aGk=",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    (range_server.folder / "bucket").mkdir()
    (range_server.folder / "bucket" / "x.bin").write_bytes(DATA)
    client, key = open_client(url, SHORT)
    with client:
        assert client.read(key, 0, 9) == DATA[:9]  # the guard lets requests to the store itself through
        range_server.set(redirects={"/bucket/x.bin": f"{other.url}/x.bin"})
        for ask in (client.head, lambda key: client.read(key, 0, 9), lambda key: client.put(key, b"x")):
            with pytest.raises(RemoteError, match="redirects to another one, which is not followed"):
                ask(key)
    assert not other.log()
    assert client.counts.retries == 0


def test_behind_a_proxy_of_the_environment_requests_go_there(monkeypatch):
    assert guard("https://host/x")["proxy_excludes"] == "host"
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert not guard("https://host/x") and not guard("s3://bucket")
    monkeypatch.setenv("NO_PROXY", "host")
    assert guard("https://host/x") and not guard("s3://bucket")


def test_a_clock_that_is_wrong_is_called_so(range_server, monkeypatch):
    (range_server.folder / "bucket").mkdir()
    (range_server.folder / "bucket" / "x").write_bytes(DATA)
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "hidden"}
    for name, value in ({"AWS_ENDPOINT_URL": range_server.url} | keys).items():
        monkeypatch.setenv(name, value)
    range_server.set(status=403, code="RequestTimeTooSkewed")
    client, key = open_client("s3://bucket/x", SHORT)
    with client:
        with pytest.raises(AccessError, match=r"RequestTimeTooSkewed.*the clock of this machine differs"):
            client.read(key, 0, 9)
        with pytest.raises(AccessError, match="the clock of this machine is right"):
            client.head(key)  # whose answer has no body that could say it
    assert failure_of(ValueError("Server clock: Request date header too old")).kind == "clock"


def test_a_listing_that_repeats_itself_ends(range_server, monkeypatch):
    client, _ = open_client(f"memory://{Path(range_server.url).name}/x")
    client.put("a", b"1")
    pages = client._backend.pages
    again = (page for _ in iter(int, 1) for page in pages("", ""))
    monkeypatch.setattr(client._backend, "pages", lambda *_: again)
    with pytest.raises(RemoteError, match="again and again"):
        for _ in client.list(""):
            pass
