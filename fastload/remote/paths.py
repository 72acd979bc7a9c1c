"""Paths that are URLs: `ObjectPath`, which joins names as any path does; and the `Remote` that is in force.

A source or an output behind a URL is passed through functions that take paths. None of them may open it by its name on
this machine: there is no such file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path, PosixPath
from urllib.parse import unquote, urlsplit

from fastload.errors import OptionError
from fastload.remote.options import Remote, is_url, shown

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
