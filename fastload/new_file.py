"""Files that are written beside what is printed: checked before any work, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fastload.errors import OutputError


def check_new_file(path: str | os.PathLike[str], *, force: bool = False, option: str = "--force") -> None:
    """Fail now, not after minutes of work, if no file could be written to `path`.

    Args:
        path: file to be written.
        force: whether a file that exists may be replaced.
        option: that says so.

    Raises:
        OutputError: it exists, is a folder, its folder does not exist or does not let a file be made in it.
    """
    path = Path(path)
    folder = path.absolute().parent
    if path.is_dir():
        raise OutputError(f"{path}: is a folder. Give the name of a file in it.")
    # A link that leads nowhere is something that exists, too.
    if os.path.lexists(path) and not force:
        raise OutputError(f"{path}: exists. Choose another name, or replace it with `{option}` (`force=True`).")
    if not folder.is_dir():
        raise OutputError(f"{path}: its folder {folder} does not exist. Make it first.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: no permission to make a file in {folder}. Choose another folder.")


def save_text(text: str, path: Path, *, force: bool) -> None:
    """Write `text` as UTF-8 to `path`: under another name beside it first, so that nobody ever sees half of it.

    Raises:
        OutputError: it cannot be written, or came into being meanwhile and `force` is not set.
    """
    path = path.absolute()
    unfinished: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".part", dir=path.parent)
        unfinished = Path(name)
        # Surrogates stand for bytes of a file name that are not UTF-8; they are written out.
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp lets nobody else read its file; a report gets the rights that any new file would.
        umask = os.umask(0)
        os.umask(umask)
        unfinished.chmod(0o666 & ~umask)
        if force:
            os.replace(unfinished, path)
        else:
            # Unlike a rename, a link fails when something of that name has come into being meanwhile.
            _link_or_rename(unfinished, path)
    except FileExistsError as exc:
        raise OutputError(f"{path}: exists. Choose another name, or replace it with `--force`.") from exc
    except OSError as exc:
        raise OutputError(f"{path}: cannot be written ({exc.strerror or exc}).") from exc
    finally:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)


def _link_or_rename(unfinished: Path, path: Path) -> None:
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links on this file system (FAT, some network mounts)
        os.replace(unfinished, path)
