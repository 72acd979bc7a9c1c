"""An output behind a URL: whether it can be written, what lies there, and the upload of a file that is packed here."""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from fastload.errors import (
    AccessError,
    FastloadError,
    FormatError,
    MissingFileError,
    ObjectExistsError,
    ObjectMissingError,
    OutputError,
    RemoteError,
    ReplacedError,
)
from fastload.format.header import PackedFile, read_header
from fastload.pack.begin import remove
from fastload.pack.pack_options import output_exists
from fastload.remote.backend import ObjectInfo
from fastload.remote.client import PART_BYTES, Client
from fastload.remote.headers import fetch_header
from fastload.remote.own_files import check_own
from fastload.remote.ranges import client_of
from fastload.remote.urls import ObjectPath, remote_in_force
from fastload.system.files import output_errors

AT_ONCE_BYTES = PART_BYTES
"""Files up to this size are written by one request, which the store refuses if the object is there meanwhile."""

_READ_BYTES = 2**23
_MOST_PARTS = 9_000  # S3 takes 10,000
_KEPT = "What was packed is kept on this machine: the same command continues with it."

_log = logging.getLogger("fastload")


def check_url(path: ObjectPath, *, overwrite: bool) -> None:
    """Raises now, not after hours of packing, if no object could be written to a URL.

    To see that, a small object is written next to it, and deleted.

    Raises:
        OutputError: it is of a web server, or names no object; or it exists (unless `overwrite`).
        RemoteError: the bucket is missing, or refuses.
    """
    if str(path).startswith(("http://", "https://")):
        raise OutputError(
            f"{path}: a web server cannot be written to. Give a URL of a store, such as s3://bucket/out.h5, or pack to "
            "a file of this machine and upload that."
        )
    if not client_of(path)[1]:
        raise OutputError(f"{path}: names a bucket. Name an object in it, such as {path}/out.h5.")
    if found_object(path) is not None and not overwrite:
        raise output_exists(path)
    try:
        with probe_of(path):
            pass
    except ObjectMissingError as exc:
        raise ObjectMissingError(f"{path}: there is no such bucket. Check its name, or make it.") from exc


@contextmanager
def probe_of(path: ObjectPath) -> Iterator[ObjectPath]:
    """Writes a small object next to an output, gives its URL, and deletes it."""
    probe = path.with_name(f"{path.name}.probe-{secrets.token_hex(4)}")
    client, key = client_of(probe)
    client.put(key, b"\n")
    try:
        yield probe
    finally:
        try:
            client.delete(key)
        except AccessError as exc:
            _log.warning("%s: written to see whether this can be done, and cannot be deleted: %s", probe, exc)


def found_object(path: ObjectPath) -> ObjectInfo | None:
    """Returns what lies at a URL; None if nothing does."""
    client, key = client_of(path)
    try:
        return client.head(key)
    except ObjectMissingError:
        return None


def exists(path: Path) -> bool:
    """Whether there is a file, or an object, of that path."""
    return found_object(path) is not None if isinstance(path, ObjectPath) else path.exists()


def remove_output(path: Path) -> None:
    """Removes a file, or an object, or nothing."""
    if isinstance(path, ObjectPath):
        client, key = client_of(path)
        client.delete(key)
    else:
        remove(path)


@contextmanager
def header_at(path: Path) -> Iterator[PackedFile]:
    """Gives the header of a packed file; of an object by ranges, in a sparse copy that is there within the block.

    Raises:
        MissingFileError: there is none.
        FormatError: it is no packed file, or damaged.
    """
    if not isinstance(path, ObjectPath):
        yield read_header(path)
        return
    client, key = client_of(path)
    info = client.head(key)
    with tempfile.TemporaryDirectory(prefix="fastload-header-") as folder:
        yield fetch_header(client, key, info.num_bytes, info.etag, Path(folder) / path.name)


def work_folder(path: ObjectPath) -> Path:
    """Returns the folder of this machine in which the object of that URL is made; it is there."""
    folder = _folder_of(path)
    with output_errors(f"{folder}: cannot be made ({{}}). Name another by Remote(cache=) or FASTLOAD_CACHE."):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not remote_in_force().shared:
        check_own(folder.parent, is_root=False)
    check_own(folder, is_root=True)  # what lies here is uploaded
    return folder


def _folder_of(path: ObjectPath) -> Path:
    return remote_in_force().cache_folder() / f"pack-{xxhash.xxh3_64_hexdigest(str(path).encode())}"


def disk_of(path: Path) -> Path:
    """Returns the folder of an output; for a URL one that exists, on the disk where what goes there is made."""
    if not isinstance(path, ObjectPath):
        return path.absolute().parent
    return next(folder for folder in _folder_of(path).absolute().parents if folder.is_dir())


def remove_empty(folder: Path) -> None:
    """Removes a work folder unless something lies in it."""
    with suppress(OSError):
        folder.rmdir()


def packed_marker(local: Path) -> Path:
    """Returns the path of the record of what a complete file that is to be uploaded was packed of."""
    return local.with_name(f"{local.name}.packed")


def was_packed(path: ObjectPath) -> bool:
    """Whether a complete file for this URL lies on this machine: an earlier call was killed before its end."""
    return packed_marker(_folder_of(path) / path.name).exists()


def is_same_packed(path: ObjectPath, local: Path) -> bool:
    """Whether an object is the packed file that lies on this machine, by its size and its header."""
    with suppress(FormatError, MissingFileError), header_at(path) as found:
        here = read_header(local)
        return (found.identity.size, found.header_digest) == (here.identity.size, here.header_digest)
    return False


def upload(
    local: Path,
    to: ObjectPath,
    *,
    before: ObjectInfo | None,
    progress: Callable[[int, int], None] | None = None,
    is_same: Callable[[ObjectPath, Path], bool] = is_same_packed,
    at_once: bool = False,
) -> None:
    """Uploads a file of this machine; nothing of the object is visible before all of it is.

    A file above AT_ONCE_BYTES goes in parts. These are not completed on a condition, as obstore has none for that: the
    store is asked right before, and what somebody else completes between these two requests is replaced.

    Args:
        local: the file.
        to: its URL.
        before: the object that was there and may be replaced; None: there was none.
        progress: called with the bytes sent so far, and all.
        is_same: whether what somebody else has written meanwhile is the same as the file: then all is well.
        at_once: one request, of whatever size.

    Raises:
        OutputError: somebody else has written the object meanwhile, and it is another one.
        RemoteError: it cannot be written.
    """
    client, key = client_of(to)
    size = local.stat().st_size
    only_if = "absent" if before is None else before.etag
    try:
        with output_errors(f"{local}: cannot be read ({{}}). Run the same command again."), open(local, "rb") as file:
            if at_once or size <= AT_ONCE_BYTES:
                data: Any = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if size else b""
                client.put(key, memoryview(data), only_if=only_if)
            else:
                _upload_parts(client, key, to, file.fileno(), size, before, progress)
        if progress:
            progress(1, 1)
    except (ObjectExistsError, ReplacedError) as exc:
        if not is_same(to, local):
            if before is None:
                raise output_exists(to) from exc
            raise OutputError(f"{to}: was replaced by somebody else since this call began. {_KEPT}") from exc
    except RemoteError as exc:
        raise type(exc)(f"{exc} {_KEPT}") from exc
    if (there := client.head(key).num_bytes) != size:
        raise RemoteError(f"{to}: has {there:,} bytes after {size:,} were uploaded. Run the same command again.")


def _upload_parts(
    client: Client,
    key: str,
    to: ObjectPath,
    fd: int,
    size: int,
    before: ObjectInfo | None,
    progress: Callable[[int, int], None] | None,
) -> None:
    with client.upload(key, part_bytes=max(PART_BYTES, -(-size // _MOST_PARTS))) as parts:
        done = 0
        while data := os.pread(fd, _READ_BYTES, done):
            parts.write(data)
            done += len(data)
            if progress:
                progress(done, size)
        if (now := found_object(to)) != before:
            if before is None or now is None:
                raise ObjectExistsError(f"{to}: was written or deleted by somebody else meanwhile.")
            raise ReplacedError(f"{to}: was replaced by somebody else meanwhile.")
        parts.finish()


@contextmanager
def shown_as(folder: Path, url: ObjectPath) -> Iterator[None]:
    """Within the block, errors name the objects of a URL, not their copies in a folder of this machine."""
    try:
        yield
    except FastloadError as exc:
        text = str(exc).replace(f"{folder}/", f"{url}/").replace(str(folder), str(url))
        raise type(exc)(text) from exc
