"""URLs in the place of paths: `Remote`, how they are read; how messages show them; and `ObjectPath`, a URL as a path.

A source or an output behind a URL is passed through functions that take paths. None of them may open it by its name on
this machine: there is no such file.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path, PosixPath
from urllib.parse import unquote, urlsplit

from fastload.errors import OptionError, check_whole, is_whole
from fastload.system.text import bytes_of

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class Remote:
    """Options for requesting objects behind a URL and keeping their bytes on this machine.

    It holds no secret: credentials come from where the provider's own tools look for them.

    Args:
        cache: folder of the chunks kept on this machine; None: $FASTLOAD_CACHE, else $XDG_CACHE_HOME/fastload, else
            ~/.cache/fastload.
        max_bytes: most bytes kept there, as a number or as text such as "500 GB" or "64MiB"; None: nine tenths of what
            is free on that disk when it is first used.
        in_flight: most requests in progress at once.
        timeout: seconds after which one request has failed, its body included, and is sent again.
        give_up_after: seconds for which a request is repeated, counted from its first failure.
        check: whether fetched bytes are compared with their digests.
        shared: whether other users may write to the cache, such as a group. Then each row is compared with its digest
            each time that it is read. If False, such a folder is refused.

    Raises:
        OptionError: a value is invalid; the message lists accepted ones.
    """

    cache: str | Path | None = None
    max_bytes: int | str | None = None
    in_flight: int = 32
    timeout: float = 30.0
    give_up_after: float = 300.0
    check: bool = True
    shared: bool = False

    def __post_init__(self) -> None:
        folder: object = self.cache
        if folder is not None and (
            not isinstance(folder, str | os.PathLike) or not os.fspath(folder) or is_url(os.fspath(folder))
        ):
            raise OptionError(f"cache={folder!r}: give a folder of this machine, or None for ~/.cache/fastload")
        self.limit()
        check_whole("in_flight", self.in_flight, least=1)
        for name, least in (("timeout", "more than 0"), ("give_up_after", "0 or more")):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (name == "timeout" and value == 0):
                raise OptionError(f"{name}={value!r}: give seconds, a number, {least}")
        for name in ("check", "shared"):
            if not isinstance(value := getattr(self, name), bool):
                raise OptionError(f"{name}={value!r}: give True or False")
        if self.shared and not self.check:
            raise OptionError("shared=True and check=False: what others may have written is always compared")

    def cache_folder(self) -> Path:
        """Returns the folder of the cache; it need not exist yet."""
        if self.cache is not None:
            return Path(self.cache).expanduser()
        if own := os.environ.get("FASTLOAD_CACHE"):
            return Path(own).expanduser()
        base = os.environ.get("XDG_CACHE_HOME")
        # The specification ignores a relative XDG_CACHE_HOME.
        return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "fastload"

    def limit(self) -> int | None:
        """Returns the most bytes that the cache may hold; None where the disk's free space decides."""
        given = self.max_bytes
        if given is None:
            return None
        count = given if is_whole(given) else bytes_of(given) if isinstance(given, str) else None
        if count is None or count < 1:
            raise OptionError(
                f"max_bytes={given!r}: give a whole number of bytes, 1 or more, text such as '2TB', '500 GB' or "
                "'64MiB', or None for nine tenths of what is free on the disk"
            )
        return int(count)


def is_url(text: object) -> bool:
    """Whether this is a text such as `s3://bucket/file.h5`: a scheme, then `://`; `file://` too."""
    return isinstance(text, str) and _SCHEME.match(text) is not None


def shown(url: str) -> str:
    """Returns a URL as messages show it: without user, password, query and fragment, which may hold secrets."""
    scheme, _, rest = url.partition("://")
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    user, _, host = host.rpartition("@")
    container = f"{user}@" if scheme.lower() in ("abfs", "abfss") and ":" not in user and user else ""
    return f"{scheme}://{container}{host}{slash}{path}"


_remote: ContextVar[Remote | None] = ContextVar("remote", default=None)


class ObjectPath(PosixPath):
    """The URL of an object, or of all objects below it, as a path; `str` is the URL, which holds no secret."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def absolute(self) -> ObjectPath:
        return self

    def resolve(self, strict: bool = False) -> ObjectPath:
        return self


def path_of(given: str | Path) -> Path:
    """Returns a path: an `ObjectPath` for a URL, but the file itself for one of `file://`.

    Raises:
        OptionError: the URL has a user, a password or a query, which would end up in plans, journals and messages.
    """
    if isinstance(given, Path) or not is_url(given):
        return Path(given) if isinstance(given, str) else given
    scheme, _, rest = given.partition("://")
    if scheme.lower() == "file":
        return Path(unquote(urlsplit(given).path))
    host = f"{scheme}://{rest.partition('/')[0]}"
    if "?" in rest or host != shown(host):
        raise OptionError(
            f"{shown(given)}: this URL comes with a user, a password or a query. What is packed keeps its URL, so give "
            "one without them, and the credentials where the provider's own tools look for them (see "
            "docs/object-storage.md)."
        )
    return ObjectPath(f"{scheme.lower()}://{rest}")


@contextmanager
def requests_as(remote: Remote | None) -> Iterator[None]:
    """Within the block, objects that are opened by their path are requested as this says; None: as before it."""
    token = _remote.set(remote or _remote.get())
    try:
        yield
    finally:
        _remote.reset(token)


def remote_in_force() -> Remote:
    """Returns how objects are requested here; see `requests_as`."""
    return _remote.get() or Remote()


FileName = str | os.PathLike[str]
"""A path, or a URL, which is a str: pathlib would make one slash of two."""


def as_given(name: FileName) -> Path | str:
    """Returns a path as a Path, a URL without what may be secret in it: for results that say what they are of."""
    return shown(str(name)) if is_url(name) else Path(name)


def short_name(name: Path | str) -> str:
    """Returns what a line on a file begins with: the name of a path, the whole of a URL; from `as_given`."""
    return name if isinstance(name, str) else name.name


def local_path(name: FileName, why: str) -> Path:
    """Returns a path; OptionError for a URL, which cannot be taken there: `why` says so, and what to do."""
    if is_url(name):
        raise OptionError(f"{shown(str(name))}: {why}")
    return Path(name)
