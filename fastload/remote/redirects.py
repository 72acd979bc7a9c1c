"""Which hosts a client of obstore may speak to, so that no secret follows a redirect; and where a web object has moved.

obstore follows redirects by itself, and sends a session token, and a signed query as Referer, to wherever they lead.
It knows no option against that. But it takes a proxy, and hosts that are reached without one: with a proxy that nobody
can be, every other host is refused before a byte is sent to it.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import ssl
import threading
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from fastload.remote.backend import Failure

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
