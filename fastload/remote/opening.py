"""Opens a packed file or an index by its path or its URL: `open_packed`, for what reads either of them once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

from fastload.errors import CacheError, FastloadError, OptionError
from fastload.format.header import PackedFile, read_header
from fastload.remote.cache import DiskFullError
from fastload.remote.options import Remote, is_url, shown

FileName = str | os.PathLike[str]
"""A path, or a URL, which is a str: pathlib would make one slash of two."""


@contextmanager
def open_packed(name: FileName, remote: Remote | None = None) -> Iterator[PackedFile]:
    """Yields the header of a file, read from its path or its URL; for a URL everything is closed afterwards.

    Errors raised within it name URLs where they would name a copy in the cache.

    Raises:
        MissingFileError, FormatError: as `read_header`.
        RemoteError, OptionError: as `open_remote`.
    """
    if not is_url(name):
        yield read_header(Path(name))
        return
    from fastload.remote.open_url import open_remote  # imports what a local file does not need

    url, remote = str(name), remote or Remote()
    try:
        file = open_remote(url, remote)
        with closing(cast(Any, file.remote)) as shards:
            shards.source.lets_damage_pass = True  # commands compare each row
            yield file
    except DiskFullError as exc:
        raise CacheError(
            f"{remote.cache_folder()}: the disk of the cache is full. Make room there (`fastload cache clear` removes "
            f"what no job uses), or name another folder: FASTLOAD_CACHE, Remote(cache=...)."
        ) from exc
    except FastloadError as exc:
        exc.args = (_with_urls(str(exc), url, remote), *exc.args[1:])
        raise


def _with_urls(text: str, url: str, remote: Remote) -> str:
    """Returns a message that names the objects of a URL instead of their copies in the cache."""
    cache = re.escape(str(remote.cache_folder().absolute()))
    folder = shown(url).rpartition("/")[0] + "/"
    return re.sub(rf"{cache}/1/[^/\s]+/", lambda _: folder, text)


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
