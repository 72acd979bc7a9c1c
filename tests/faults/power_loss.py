"""What a folder may hold after a crash: a recorded sequence of file operations, of which some reached the disk.

The rules of POSIX, without what some file systems promise beyond: the content of a file is on the disk once the file is
synced (or its file system), the names in a folder once the folder is; of all since then any part may be there. A write
that is not synced may be there in whole, in some of its sectors, as zeros, or not at all, whatever became of others
before and behind it. Of the names in one folder those of earlier operations come first, since file systems log them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from faulty_commands import CREATED, TRUNCATED, Call

SECTOR = 512

Mode = Literal["killed", "torn", "all lost", "names kept", "names lost", "some lost"]
MODES: tuple[Mode, ...] = ("killed", "torn", "all lost", "names kept", "names lost", "some lost")
"""What is lost of all that is not synced: nothing; the end of the last write; all; all content but no name; all names;
random parts of both."""

CHANGES = ("write", "truncate", "allocate", "rename", "link", "unlink", "mkdir", "sync", "open")


@dataclass
class _File:
    """A file: its content when recording began, and what was done to it since, by number of the call."""

    content: bytes = b""
    changes: list[tuple[int, Call]] = field(default_factory=list)
    synced: int = -1  # all calls before this one are on the disk


def changing_calls(calls: Sequence[Call], folder: Path) -> list[Call]:
    """Returns the calls that change or sync something in a folder, with paths relative to it."""
    inside, found = str(folder), []
    for call in calls:
        if call.kind not in CHANGES or (call.kind == "open" and not call.offset):
            continue
        if not (call.path + "/").startswith(inside + "/") or call.path.endswith(" (deleted)"):
            continue
        paths = [path[len(inside) :].lstrip("/") for path in (call.path, call.other)]
        found.append(call._replace(path=paths[0], other=paths[1]))
    return found


def after_crash(
    start: dict[str, bytes | None], calls: Sequence[Call], stop: int, mode: Mode, rng: random.Random
) -> dict[str, bytes | None]:
    """Returns the files, and the folders as None, after a crash in call number `stop`; the earlier ones returned.

    `start` is what the folder held when the first call began, all of it on the disk.
    """
    files = {path: _File(data) for path, data in start.items() if data is not None}
    names = dict(files)  # as the running system sees them
    entries: dict[str, list[tuple[int, Call, _File | None]]] = {}  # folder -> changes of its names
    entries_synced: dict[str, int] = {}
    for number, call in enumerate(calls[: stop + (mode == "torn")]):
        file = names.get(call.path)
        if call.kind == "sync":
            whole_system = bool(call.offset)
            for each in {id(file): file for file in [*names.values(), *_files_in(entries)]}.values():
                if whole_system or each is file:
                    each.synced = number
            for folder in list(entries):
                if whole_system or (file is None and folder == call.path):
                    entries_synced[folder] = number
            continue
        if call.kind == "open" and call.offset & CREATED:
            names[call.path] = file = _File()
            _entry(entries, call.path, number, call, file)
        elif call.kind in ("rename", "link"):
            assert _folder(call.path) == _folder(call.other) and file is not None
            names[call.other] = names.pop(call.path) if call.kind == "rename" else file
            _entry(entries, call.path, number, call, file)
        elif call.kind == "unlink":
            names.pop(call.path)
            _entry(entries, call.path, number, call, None)
        elif call.kind == "mkdir":
            _entry(entries, call.path, number, call, None)
        changes = call.kind in ("write", "truncate", "allocate") or (call.kind == "open" and call.offset & TRUNCATED)
        if changes and file is not None:
            file.changes.append((number, call))
    kept: dict[str, _File | None] = {**{path: None for path, data in start.items() if data is None}, **files}
    for folder, changes in entries.items():
        for _, call, file in changes[: _names_kept(changes, entries_synced.get(folder, -1), mode, rng)]:
            if call.kind == "rename":
                kept.pop(call.path, None)
            if call.kind == "unlink":
                kept.pop(call.path, None)
            else:
                kept[call.other or call.path] = file
    found = {path: None if file is None else _content(file, stop, mode, rng) for path, file in kept.items()}
    reached = {path for path, data in found.items() if data is None} | {""}
    return {path: data for path, data in found.items() if all(above in reached for above in _above(path))}


def _files_in(entries: dict[str, list[tuple[int, Call, _File | None]]]) -> list[_File]:
    return [file for changes in entries.values() for _, _, file in changes if file is not None]


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _above(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[:count]) for count in range(len(parts) + 1)]


def _entry(
    entries: dict[str, list[tuple[int, Call, _File | None]]], path: str, number: int, call: Call, file: _File | None
) -> None:
    entries.setdefault(_folder(path), []).append((number, call, file))


def _names_kept(changes: Sequence[tuple[int, Call, _File | None]], synced: int, mode: Mode, rng: random.Random) -> int:
    """Returns how many changes of the names in a folder are on the disk, the first ones."""
    least = sum(number < synced for number, _, _ in changes)
    if mode in ("all lost", "names lost"):
        return least
    return rng.randint(least, len(changes)) if mode == "some lost" else len(changes)


def _content(file: _File, stop: int, mode: Mode, rng: random.Random) -> bytes:
    data = bytearray(file.content)
    for number, call in file.changes:
        if number < file.synced or mode in ("killed", "names lost"):
            _apply(data, call)
        elif mode == "torn":
            cut = (
                call.length
                if number < stop
                else rng.choice([rng.randint(0, call.length), call.length // SECTOR * SECTOR])
            )
            _apply(data, call if call.kind != "write" else call._replace(data=call.data[:cut]))
        elif mode == "some lost":
            _apply_some(data, call, rng)
    return bytes(data)


def _apply(data: bytearray, call: Call) -> None:
    if call.kind == "write":
        data.extend(bytes(max(0, call.offset - len(data)) if call.data else 0))
        data[call.offset : call.offset + len(call.data)] = call.data
    elif call.kind == "allocate":
        data.extend(bytes(max(0, call.offset + call.length - len(data))))
    else:  # truncated, also by opening
        length = call.length if call.kind == "truncate" else 0
        del data[length:]
        data.extend(bytes(length - len(data)))


def _apply_some(data: bytearray, call: Call, rng: random.Random) -> None:
    """Applies a call, or nothing of it, or zeros or some sectors of a write."""
    what = rng.choice(("whole", "nothing", "zeros", "sectors"))
    if what == "nothing":
        return
    if call.kind == "write" and what == "zeros":
        call = call._replace(data=bytes(call.length))
    elif call.kind == "write" and what == "sectors":
        before = bytes(data[call.offset : call.offset + call.length]).ljust(call.length, b"\0")
        mixed = bytearray(call.data)
        first = -call.offset % SECTOR
        for start in [0, *range(first, call.length, SECTOR)]:
            end = start + SECTOR if start else first or SECTOR
            if rng.random() < 0.5:
                mixed[start:end] = before[start:end]
        call = call._replace(data=bytes(mixed))
    _apply(data, call)


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Returns the files below a folder, and the folders as None, by their relative paths."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def restore(folder: Path, found: dict[str, bytes | None]) -> None:
    """Writes the files and folders of a snapshot into an empty folder."""
    for path, data in sorted(found.items()):
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)
