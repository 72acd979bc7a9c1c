"""Requests through fsspec, to what obstore does not serve: `file://`, `memory://`, `hf://`, `sftp://`, ..."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from fastload.errors import MissingExtraError, OptionError, RemoteError
from fastload.remote.backend import Data, Failure, Kind, ObjectInfo
from fastload.remote.urls import shown
from fastload.system.files import mode_for

ResultT = TypeVar("ResultT")

# Keys of `info` whose values change when a file is replaced. Creation times come last: a new link changes Linux' ctime.
_VERSION = ("ETag", "etag", "e_tag", "md5Hash", "blob_id", "checksum", "generation", "VersionId")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


class FsspecBackend:
    """Files of one fsspec file system, below what its URL names.

    fsspec bounds no request in time. Where it has no ETags, one is made of size and time, and starts with `~`. A read
    is compared with it on this machine and in memory only: elsewhere that would be a second request for each.
    """

    def __init__(self, url: str) -> None:
        try:
            import fsspec.core
        except ImportError as error:
            raise MissingExtraError(
                f"{url}: fsspec reads this, and is missing. Install it: pip install fsspec"
            ) from error
        scheme = url.split("://")[0]
        try:
            self._fs, self._root = fsspec.core.url_to_fs(f"{url}/")
        except ImportError as error:
            raise MissingExtraError(f"{scheme}://: fsspec needs a package for this. {error}") from error
        except ValueError:
            raise OptionError(
                f"{shown(url)}: {scheme}:// is no scheme that is known here. Give s3://, gs://, az://, https://, "
                "http://, file://, or one that fsspec serves"
            ) from None
        except Exception as error:  # noqa: BLE001  # such as ftp://, which connects at once
            reason = type(error).__name__
            raise RemoteError(f"{shown(url)}: no connection ({reason}). Check the name of the host.") from None
        self._base = url
        self._root = self._root.rstrip("/")
        self._is_local = scheme in ("file", "local")
        self._is_cheap = self._is_local or scheme == "memory"

    def renew(self) -> None:
        pass

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _try(self, request: Callable[[], ResultT]) -> ResultT:
        kind: Kind = "broken"
        try:
            return request()
        except (FileNotFoundError, NotADirectoryError):
            kind, reason = "missing", "there is no such file"
        except (FileExistsError, IsADirectoryError, NotImplementedError) as error:
            kind, reason = "invalid", type(error).__name__
        except PermissionError:
            kind, reason = "access", "permission denied"
        except TimeoutError:
            kind, reason = "timeout", "no answer in time"
        except ConnectionError as error:
            kind, reason = "unreachable", type(error).__name__
        except Failure:
            raise
        except Exception as error:  # noqa: BLE001  # packages have exceptions of their own
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__
            name = type(error).__name__.lower()
            kind = "timeout" if "timeout" in name else "unreachable" if "connect" in name else "broken"
            if self._is_cheap:  # a full disk is full also the next time
                kind = "invalid"
        raise Failure(kind, reason)  # out here: the text of what was raised may show secrets

    def head(self, key: str) -> ObjectInfo:
        info = self._try(lambda: self._fs.info(self._path(key)))
        if info["type"] == "directory":
            raise Failure("missing", "this is a folder")
        return _object(key, info)

    def get(self, key: str, span: tuple[int, int], etag: str | None, *, anew: bool = False) -> tuple[Data, ObjectInfo]:
        first, stop = span
        before = self.head(key) if etag is None else None
        data = self._try(lambda: self._fs.cat_file(self._path(key), start=first, end=stop))
        info = before or ObjectInfo(key, -1, etag, 0)
        if self._is_cheap and (before or etag is not None):
            info = self.head(key)
            if info.etag != (before.etag if before else etag):
                raise Failure("replaced", "its time or size differs")
        if len(data) != stop - first:
            kind: Kind = "short" if len(data) < stop - first else "broken"
            raise Failure(kind, f"{len(data):,} bytes came of {stop - first:,}")
        return data, info

    def pages(self, prefix: str, after: str) -> Iterator[list[ObjectInfo]]:
        folder = self._path(prefix).rpartition("/")[0]
        try:
            found = self._try(lambda: self._fs.find(folder or "/", detail=True))
        except Failure as failure:
            if failure.kind != "missing":
                raise
            return
        objects = [_object(path[len(self._root) :].lstrip("/"), info) for path, info in found.items()]
        yield sorted(item for item in objects if item.key.startswith(prefix) and item.key > after)

    def put(self, key: str, data: Data, only_if: str | None) -> str | None:
        path = self._path(key)
        if only_if is not None:
            try:
                there = self.head(key).etag
            except Failure as failure:
                if failure.kind != "missing":
                    raise
                there = None
            if only_if == "absent" and there is not None:
                raise Failure("exists", "there is a file of that name")
            if only_if not in ("absent", there):
                raise Failure("replaced", "its time or size differs")
        if self._is_local:
            writing = self.upload(key, 0)
            writing.write(data)
            return writing.finish(only_if == "absent")
        self._try(lambda: self._fs.makedirs(path.rpartition("/")[0], exist_ok=True))
        self._try(lambda: self._fs.pipe_file(path, bytes(data)))
        return self.head(key).etag

    def upload(self, key: str, part_bytes: int) -> _FsspecUpload:
        return _FsspecUpload(self, key)

    def delete(self, key: str) -> None:
        self._try(lambda: self._fs.rm_file(self._path(key)))


class _FsspecUpload:
    """A file on its way: in its folder under another name, or for another machine in a temporary file of this one."""

    def __init__(self, backend: FsspecBackend, key: str) -> None:
        self._backend, self._key = backend, key
        self._path = backend._path(key)
        backend._try(lambda: backend._fs.makedirs(self._path.rpartition("/")[0], exist_ok=True))
        folder = self._path.rpartition("/")[0] if backend._is_local else None
        self._file = backend._try(lambda: tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False))  # noqa: SIM115 - abort removes it

    def write(self, data: Data) -> None:
        self._backend._try(lambda: self._file.write(data))

    def finish(self, only_if_absent: bool = False) -> str | None:
        try:
            self._backend._try(lambda: self._move(only_if_absent))
        finally:
            self.abort()
        return self._backend.head(self._key).etag

    def _move(self, only_if_absent: bool) -> None:
        self._file.close()
        if not self._backend._is_local:
            self._backend._fs.put_file(self._file.name, self._path)
            return
        os.chmod(self._file.name, mode_for(Path(self._path)))
        if not only_if_absent:
            os.replace(self._file.name, self._path)
            return
        try:
            os.link(self._file.name, self._path)  # fails where there is one, without a moment in between
        except FileExistsError:
            raise Failure("exists", "there is a file of that name") from None

    def abort(self) -> None:
        with suppress(OSError):
            self._file.close()
        Path(self._file.name).unlink(missing_ok=True)


def _object(key: str, info: dict[str, Any]) -> ObjectInfo:
    version = next((info[name] for name in _VERSION if info.get(name)), None)
    time = next((info[name] for name in _TIMES if info.get(name) is not None), None)
    if isinstance(time, str):  # memory:// gives a text where it lists, a datetime where it is asked for one
        with suppress(ValueError):
            time = datetime.fromisoformat(time)
    seconds = time.timestamp() if isinstance(time, datetime) else time if isinstance(time, int | float) else 0.0
    text = f"{info['size']} {seconds} {info.get('ino')}"
    etag = str(version) if version else f"~{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return ObjectInfo(key, int(info["size"]), etag, round(seconds * 1e9))
