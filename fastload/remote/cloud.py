"""Requests through obstore, to S3, Google Cloud Storage, Azure and plain web servers: `CloudBackend`.

Checked with obstore 0.12: it never repeats a request here (its retries are off), leaves the GIL while it waits, and
hangs for ever in a fork of a process in which it made a request, also with what the fork opens itself. It takes all of
an error's body and of a page of a listing into memory, whatever their length; only the timeout ends that.
"""

from __future__ import annotations

import configparser
import http.client
import importlib.util
import os
import queue
import re
import socket
import ssl
import threading
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from fastload.errors import AccessError, MissingExtraError, OptionError
from fastload.remote.backend import Data, Failure, Kind, ObjectInfo
from fastload.remote.urls import Remote, shown

# obstore follows redirects by itself, and sends a session token, and a signed query as Referer, to wherever they lead.
# It knows no option against that. But it takes a proxy, and hosts that are reached without one: with a proxy that
# nobody can be, every other host is refused before a byte is sent to it.
NOBODY = "127.0.0.1:0"  # nobody can listen on port 0

_MOST_HOPS = 5
_LONGEST_URL = 16_384
_MOST_NAMED_BYTES = 2**16  # of a file of credentials that a variable names
_VARIABLES = {"s3": "AWS_", "s3a": "AWS_", "gs": "GOOGLE_", "az": "AZURE_", "abfs": "AZURE_", "abfss": "AZURE_"}
# Where machines, containers and services of a provider ask for credentials; 169.254.0.0/16 never leaves the machine.
_CREDENTIALS_AT = {
    "AWS_": ("169.254.0.0/16", "fd00:ec2::254", "fd00:ec2::23", "sts.amazonaws.com"),
    "GOOGLE_": ("169.254.0.0/16", "metadata.google.internal", "metadata", "googleapis.com", "accounts.google.com"),
    "AZURE_": ("169.254.0.0/16", "login.microsoftonline.com", "login.microsoftonline.us", "login.chinacloudapi.cn"),
}


def guard(url: str) -> dict[str, str]:
    """Returns the options of obstore's client with which it speaks to a server, and to no host that this redirects to.

    No option where the environment names a proxy: requests go to that, whatever they are redirected to.
    """
    parts = urlsplit(url)
    is_web = parts.scheme in ("http", "https")
    proxies = {*urllib.request.getproxies()} & {"http", "https", "all"}
    if any(os.environ.get(f"{name}PROXY_URL") for name in _CREDENTIALS_AT):
        return {}
    if proxies and not (is_web and urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2])):
        return {}
    hosts = [_ascii(parts.hostname or "")] if is_web else [*_hosts_of_store(parts)]
    return {"proxy_url": f"http://{NOBODY}", "proxy_excludes": ",".join(dict.fromkeys(filter(None, hosts)))}


def _ascii(host: str) -> str:
    """Returns a host as it is asked for."""
    try:
        return host.encode("idna").decode()
    except UnicodeError:
        return host


def _hosts_of_store(parts: SplitResult) -> Iterator[str]:
    """Yields the hosts at which a bucket, and credentials for it, may be asked for."""
    variables = _VARIABLES[parts.scheme]
    yield from _CREDENTIALS_AT[variables]
    # What the user's own variables, and files that they name, say: endpoints, and where tokens come from.
    for name, value in os.environ.items():
        if name.startswith((variables, "IDENTITY_", "MSI_", "AZURITE_")):
            yield from _named_in(value)
            if name.endswith(("CREDENTIALS", "_ACCOUNT", "_PATH")) and value and not value.startswith("{"):
                yield from _named_in(_beginning(Path(value).expanduser()))
    if variables == "AWS_":
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        yield from (f"s3.{region}.amazonaws.com", f"sts.{region}.amazonaws.com")
        if zone := re.search(r"--([a-z0-9-]+)--x-s3$", parts.hostname or ""):
            yield f"s3express-{zone[1]}.{region}.amazonaws.com"
    if variables == "AZURE_":
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME") or (parts.hostname or "").partition(".")[0]
        yield from (f"{account}.blob.core.windows.net", f"{account}.dfs.core.windows.net", parts.hostname or "")
        yield from (f"{account}.blob.fabric.microsoft.com", f"{account}.dfs.fabric.microsoft.com")
        if os.environ.get("AZURE_STORAGE_USE_EMULATOR"):
            yield "127.0.0.1"


def _named_in(text: str) -> list[str]:
    """Returns the hosts of all URLs in a text."""
    return re.findall(r"https?://(?:[^/@\s\"']*@)?\[?([\w.:-]+?)\]?(?::\d+)?(?=[/\s\"',?]|$)", text)


def _beginning(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_NAMED_BYTES)
    except OSError:
        return ""


def moved_to(url: str, timeout_s: float) -> str:
    """Returns the URL that a web server redirects to, through a bounded number of hops.

    Each is a HEAD without body. User and password go only to the server that the URL names, which alone sees its query.

    Raises:
        Failure: a hop leads from https to http or to no web server, there are too many, or no answer came.
    """
    first = urlsplit(url)
    for _ in range(_MOST_HOPS):
        location = _location(url, timeout_s, with_user=_server(urlsplit(url)) == _server(first))
        if location is None:
            return url
        there = urlsplit(joined := urljoin(url, location))
        if there.scheme not in ("http", "https") or not there.hostname or len(joined) > _LONGEST_URL:
            raise Failure("invalid", "the server redirects to what is no URL of a web server")
        if urlsplit(url).scheme == "https" and there.scheme == "http":
            raise Failure("invalid", "the server redirects from https:// to http://, which is not followed")
        is_same = _server(there) == _server(first)
        netloc = first.netloc if is_same else there.netloc.rpartition("@")[2]
        url = there._replace(netloc=netloc, fragment="").geturl()
    raise Failure("invalid", f"the server redirects more than {_MOST_HOPS} times")


def _server(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port


def _location(url: str, timeout_s: float, *, with_user: bool) -> str | None:
    """Returns where a server redirects to; None: nowhere."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname or "", parts.port, timeout=timeout_s, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    headers = {"Accept": "*/*"}
    if with_user and parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {b64encode(user.encode()).decode()}"
    # The timeout of a socket is one of each read: a server that sends a byte now and then would never end.
    timer = threading.Timer(timeout_s, _end, [connection])
    try:
        timer.start()
        connection.request("HEAD", f"{parts.path or '/'}{'?' * bool(parts.query)}{parts.query}", headers=headers)
        answer = connection.getresponse()
        return answer.getheader("Location") if 300 <= answer.status < 400 else None
    except (OSError, http.client.HTTPException, ValueError) as exc:
        kind, reason = type(exc).__name__, parts.hostname
    finally:
        timer.cancel()
        connection.close()
    raise Failure("unreachable", f"it is redirected to {reason}, which does not answer ({kind})")


def _end(connection: http.client.HTTPConnection) -> None:
    try:
        connection.sock.shutdown(socket.SHUT_RDWR)
    except (OSError, AttributeError):  # it has ended, or has not begun
        pass


SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https")

ResultT = TypeVar("ResultT")

_RETRIED = {408: "timeout", 409: "broken", 425: "broken", 429: "throttled", 503: "throttled"}
_CREDENTIALS_FROM = (
    "/latest/api/token", "/latest/meta-data/", "/computeMetadata/", "/metadata/identity/",
    "External AWS credential provider",
)  # fmt: skip
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
_CLOCK = {"RequestTimeTooSkewed", "RequestInTheFuture"}
_CLOCK_TEXTS = (
    "reasonable timeframe",  # Google, of a token that is not valid yet
    "Request date header too old",  # Azure
    "NotValidYet",  # a certificate, by rustls
    "Signature not yet current",  # AWS STS
)
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_KINDS: dict[str, tuple[Kind, str]] = {
    "Timeout": ("timeout", "no complete answer within the timeout"),
    "Connect": ("unreachable", "no connection"),
    "Interrupted": ("broken", "the answer broke off"),
}


def failure_of(error: Exception, *, is_store: bool = True) -> Failure:
    """Returns what an exception of obstore means, without its text: that has URLs, queries and answers in it.

    `is_store`: whether the server is one of a provider, not any web server.
    """
    text = str(error)
    name = type(error).__name__
    # The last ones: keys, which may say anything, come first.
    status = int(found[-1]) if (found := re.findall(r"inner: Status \{\s*status: (\d{3})", text)) else None
    code = found[-1] if (found := re.findall(r"<Code>(\w{1,60})</Code>", text)) else ""
    how = f"HTTP status {status}{f' {code}' if code else ''}" if status else ""
    if any(place in text for place in _CREDENTIALS_FROM):
        return Failure("credentials", "no credentials were found")
    if code in _CLOCK or any(said in text for said in _CLOCK_TEXTS):
        return Failure("clock", how or "the server's time is another one")
    if "redirect without LOCATION" in text or status == 301:
        return Failure("invalid", "the bucket is in another region: set AWS_REGION")
    is_nobody = re.search(rf'"tcp connect error",\s*{re.escape(NOBODY)}', text)  # see `redirects`
    if is_nobody or (status is not None and 300 <= status < 400):
        return Failure("moved", "the server redirects to another one, which is not followed")
    # A HEAD has no body, so S3 cannot say what it finds wrong with a request; ours are well-formed.
    if code in _EXPIRED or (is_store and status == 400 and "method: HEAD" in text):
        return Failure("expired", how)
    if name in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403):
        return Failure("access", how or "permission denied")
    if isinstance(error, FileNotFoundError) or status == 404:
        return Failure("missing", how or "there is no such object")
    if name == "AlreadyExistsError":
        return Failure("exists", how or "the object exists")
    if name == "PreconditionError" or status == 412:
        return Failure("replaced", how or "the ETag differs")
    if status == 416:
        return Failure("short", "it is shorter")
    if status is not None:
        kind = _RETRIED.get(status, "broken" if status >= 500 else "invalid")
        return Failure(kind, how)  # type: ignore[arg-type]
    if found := re.findall(r"ConnectError\(\s*\"([a-z ]+)\"", text):
        known = {"dns error": "the host is unknown"}.get(found[-1], found[-1])
        return Failure("unreachable", f"no connection: {known}{', refused' if 'ConnectionRefused' in text else ''}")
    if found := re.findall(r"HttpError \{\s*kind: (\w+)", text):
        return Failure(*_KINDS.get(found[-1], ("broken", f"the connection failed ({found[-1]})")))
    if name == "NotSupportedError" or "NotPartial" in text:
        return Failure("invalid", "the server does not serve ranges of bytes")
    if name == "InvalidPathError":
        found = re.findall(r'[Pp]ath "([^"]*)"', text)
        return Failure(
            "invalid",
            f"the key {found[-1]!r} has an empty part, one that is `.` or `..`, or a control character"
            if found
            else "a key there has a part that is empty, `.` or `..`",
        )
    if isinstance(error, ValueError):
        return Failure("invalid", "this is no valid key: it has an empty part, or one that is `.` or `..`")
    return Failure("broken", f"obstore raised {name}")


def _open(obstore: ModuleType, url: str, remote: Remote) -> tuple[Any, Any]:
    """Returns the bucket for single requests, and one that repeats by itself the parts of an upload."""
    seconds = remote.timeout
    client = {
        "timeout": f"{max(1, round(seconds * 1000))}ms",
        "connect_timeout": f"{max(1, round(min(seconds, 10.0) * 1000))}ms",
        # MinIO, Ceph and test servers: an endpoint that the user gave as http:// is meant. Of a web server, https://
        # is not left again.
        "allow_http": not url.startswith("https://"),
        **guard(url),
    }
    options: dict[str, Any] = {}
    for name in _ENDPOINTS if url.startswith(("s3://", "s3a://")) else ():
        if (endpoint := os.environ.get(name)) and not endpoint.startswith(("http://", "https://")):
            raise OptionError(f"{name}: the variable holds no URL. Give it with http:// or https://")
    if url.startswith(("s3://", "s3a://")) and (provider := _profile_credentials(url)):
        options["credential_provider"] = provider
    longest = timedelta(seconds=remote.give_up_after)
    backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2}
    once = {"max_retries": 0, "retry_timeout": longest}
    often = {"max_retries": 10_000, "retry_timeout": longest, "backoff": backoff}
    opened = []
    problem = ""
    try:
        for retries in (once, often):
            opened.append(obstore.store.from_url(url, client_options=client, retry_config=retries, **options))
    except (obstore.exceptions.BaseError, ValueError) as error:
        problem = str(error).split("\n")[0]
    if problem:
        # About the options only: nothing was sent so far.
        raise OptionError(f"{shown(url)}: this cannot be opened. {problem}")
    return opened[0], opened[1]


class CloudBackend:
    """Objects of one bucket, or of one web server, through obstore.

    Args:
        url: of the bucket or server, with the query that every request is to have.
        remote: how long a request may take.
    """

    def __init__(self, url: str, remote: Remote) -> None:
        self._url = url
        self._remote = remote
        self._obstore = _obstore()
        self._is_web = url.startswith(("http://", "https://"))
        self._bucket, self._uploads = _open(self._obstore, url, remote)
        self._moved: dict[str, tuple[Any, str]] = {}  # by key, of a web server: where it redirects to

    def renew(self) -> None:
        self._bucket, self._uploads = _open(self._obstore, self._url, self._remote)
        self._moved = {}

    def _try(self, request: Callable[[], ResultT]) -> ResultT:
        try:
            return request()
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            failure = failure_of(error, is_store=not self._is_web)
        raise failure  # out here, so that no traceback shows obstore's text

    def _read(self, key: str, request: Callable[[Any, str], ResultT]) -> ResultT:
        """Returns the result of reading an object, from where a web server redirects to if it does."""
        there = self._moved.get(key)
        try:
            return self._try(lambda: request(*(there or (self._bucket, key))))
        except Failure as failure:
            # What was signed for a while, and has expired, is asked for again.
            if not self._is_web or not (failure.kind == "moved" or (there and failure.kind in ("access", "missing"))):
                raise
        path, query = f"/{quote(key)}", urlsplit(self._url).query
        url = f"{self._url.partition('?')[0]}{path}{'?' * bool(query)}{query}"
        base, there_key = split(moved_to(url, self._remote.timeout))
        self._moved[key] = there = _open(self._obstore, base, self._remote)[0], there_key
        return self._try(lambda: request(*there))

    def head(self, key: str) -> ObjectInfo:
        return self._read(key, lambda bucket, there: _info(key, self._obstore.head(bucket, there)))

    def get(self, key: str, span: tuple[int, int], etag: str | None, *, anew: bool = False) -> tuple[Data, ObjectInfo]:
        options: dict[str, Any] = {"range": span}
        # A weak ETag never satisfies If-Match (RFC 9110, 13.1.1), and one made of time and size is ours.
        if etag is not None and etag.startswith('"'):
            options["if_match"] = etag
        if anew:  # connections belong to a client
            self.renew()
        answer = self._read(key, lambda bucket, there: self._obstore.get(bucket, there, options=options))
        info = _info(key, answer.meta)
        if etag is not None and info.etag != etag:
            raise Failure("replaced", "the ETag differs")
        if answer.range != span:
            raise Failure("short", f"it has {info.num_bytes:,} bytes")
        # As soon as all came that was asked for, and no later: `answer.bytes()` takes whatever a server sends.
        count = span[1] - span[0]
        data: bytes = self._try(lambda: next(answer.stream(min_chunk_size=count), b""))
        if len(data) != count:
            raise Failure("broken", f"{len(data):,} bytes came {'for' if len(data) > count else 'of'} {count:,}")
        return data, info

    def pages(self, prefix: str, after: str) -> Iterator[list[ObjectInfo]]:
        if self._is_web:
            raise Failure("invalid", "a web server has no list of its files")
        # obstore's prefix ends at a slash; ours may be the beginning of a name.
        folder = prefix.rpartition("/")[0] or None
        found = self._try(lambda: self._obstore.list(self._bucket, folder, offset=after or None, chunk_size=1000))
        while (page := self._try(lambda: next(found, None))) is not None:
            yield [_info(item["path"], item) for item in page if item["path"].startswith(prefix)]

    def put(self, key: str, data: Data, only_if: str | None) -> str | None:
        mode: Any = "overwrite" if only_if is None else "create" if only_if == "absent" else {"e_tag": only_if}
        if isinstance(mode, dict) and self._url.startswith("gs://"):  # whose conditions are on generations
            there = self._try(lambda: self._obstore.head(self._bucket, key))
            if there["e_tag"] != only_if:
                raise Failure("replaced", "the ETag differs")
            mode["version"] = there["version"]
        whole = {"use_multipart": False, "mode": mode}
        etag: str | None = self._try(lambda: self._obstore.put(self._bucket, key, data, **whole)["e_tag"])
        return etag

    def upload(self, key: str, part_bytes: int) -> _CloudUpload:
        return _CloudUpload(self._obstore, self._uploads, key, part_bytes)

    def delete(self, key: str) -> None:
        self._try(lambda: self._obstore.delete(self._bucket, key))


class _CloudUpload:
    """A multipart upload, fed through a short queue to the thread in which obstore sends it."""

    def __init__(self, obstore: ModuleType, bucket: Any, key: str, part_bytes: int) -> None:
        self._obstore, self._bucket, self._key, self._part_bytes = obstore, bucket, key, part_bytes
        self._data: queue.Queue[Data | _Aborted | None] = queue.Queue(2)
        self._etag: str | None = None
        self._failure: Failure | None = None
        self._thread = threading.Thread(target=self._send, name="fastload-upload", daemon=True)
        self._thread.start()

    def _send(self) -> None:
        try:
            done = self._obstore.put(
                self._bucket, self._key, self._taken(), use_multipart=True, chunk_size=self._part_bytes,
                max_concurrency=4,
            )  # fmt: skip
            self._etag = done["e_tag"]
        except _Aborted:
            pass
        except Exception as error:  # noqa: BLE001 - handed to the thread that writes
            self._failure = failure_of(error)

    def _taken(self) -> Iterator[Data]:
        while (data := self._data.get()) is not None:
            if isinstance(data, _Aborted):
                raise data
            yield data

    def _give(self, data: Data | _Aborted | None) -> None:
        while self._thread.is_alive():
            try:
                return self._data.put(data, timeout=0.1)
            except queue.Full:
                continue

    def write(self, data: Data) -> None:
        self._give(data)
        if self._failure:
            raise self._failure

    def finish(self) -> str | None:
        self._give(None)
        self._thread.join()
        if self._failure:
            raise self._failure
        return self._etag

    def abort(self) -> None:
        self._give(_Aborted())
        self._thread.join()


class _Aborted(Exception):
    pass


def _info(key: str, meta: Any) -> ObjectInfo:
    modified_ns = round(meta["last_modified"].timestamp() * 1e6) * 1000
    # A server without ETags: another time or size is another object.
    return ObjectInfo(key, meta["size"], meta["e_tag"] or f"~{modified_ns:x}-{meta['size']:x}", modified_ns)


def _obstore() -> ModuleType:
    try:
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise MissingExtraError(
            "objects of s3://, gs://, az:// and http:// are read through obstore, which is not installed. "
            "Install it with: pip install 'fastload-hdf5[cloud]'"
        ) from error
    return obstore


_OWN_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip
_IN_A_PROFILE = (
    "aws_access_key_id", "role_arn", "credential_process", "sso_session", "sso_start_url", "web_identity_token_file",
    "login_session",
)  # fmt: skip


def _profile_credentials(url: str) -> Callable[[], Any] | None:
    """Returns boto3's credentials where a profile of `~/.aws` is to be used, which obstore does not read; else None.

    The variables that obstore itself reads come first, as with boto3.
    """
    anonymous = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes", "on")
    if anonymous or any(os.environ.get(name) for name in _OWN_CREDENTIALS):
        return None
    chosen = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    name = chosen or "default"
    profiles = configparser.RawConfigParser(strict=False)
    try:
        for variable, file in (("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials")):
            profiles.read(Path(os.environ.get(variable) or Path("~/.aws") / file).expanduser())
    except (configparser.Error, OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{shown(url)}: the profiles of ~/.aws cannot be read ({type(error).__name__})") from None
    sections = [part for part in (name, f"profile {name}") if profiles.has_section(part)]
    if not any(profiles.has_option(section, option) for section in sections for option in _IN_A_PROFILE):
        if chosen:
            raise AccessError(
                f"{shown(url)}: the profile {chosen!r}, named by AWS_PROFILE, has no credentials in ~/.aws"
            )
        return None
    if importlib.util.find_spec("boto3") is None:
        raise MissingExtraError(
            f"{shown(url)}: the credentials come from the profile {name!r} in ~/.aws, which boto3 reads, and boto3 "
            "is not installed. Install it with `pip install boto3`, or set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket."
        )
    import boto3.session
    import botocore.exceptions
    from obstore.auth.boto3 import Boto3CredentialProvider

    problem = ""
    try:
        # Asked again after five minutes: botocore renews what expires within ten.
        return Boto3CredentialProvider(boto3.session.Session(), ttl=timedelta(minutes=5))
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        problem = type(error).__name__
    raise AccessError(f"{shown(url)}: boto3 finds no credentials in the profile {name!r} of ~/.aws ({problem}).")


def split(url: str) -> tuple[str, str]:
    """Returns the URL of the bucket (or host, with the query) that an object is in, and the path behind it, decoded."""
    scheme, _, rest = url.partition("://")
    if scheme.lower() in ("http", "https"):
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise OptionError(f"{shown(url)}: this is no URL ({error}). Check the name of the host.") from None
        query = f"?{parts.query}" if parts.query else ""
        return f"{scheme.lower()}://{parts.netloc}{query}", unquote(parts.path).lstrip("/")
    bucket, _, key = rest.partition("/")
    return f"{scheme.lower()}://{bucket}", key
