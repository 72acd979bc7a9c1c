"""Messages for arguments that a loader does not have: torch's `DataLoader`'s, other objects', and misspelt ones."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

from fastload.dataset import PackedDataset, is_unpacked
from fastload.errors import OptionError
from fastload.loader.loader_options import List, Pad, Workers
from fastload.system.argument_names import nearest_name

_OF_DATALOADER = {
    "dataset": "it is the first argument, `source`",
    "num_workers": "`workers=` is the number of threads, or of processes where samples take Python code; leave it out "
    "for as many as suit this machine",
    "drop_last": '`ends="drop"` drops a last batch that is not full, `ends="exact"` makes it shorter, `ends="pad"` '
    "fills it up",
    "collate_fn": "batches are filled in place, a tensor for each field. What changes whole batches is a transform "
    '(`transform=[...]`); `batch="list"` or "pad" takes images of their own sizes; for another form of batches take a '
    "plain DataLoader over the PackedDataset",
    "pin_memory": '`device="cuda"` copies from pinned memory while the model computes; leave it out',
    "pin_memory_device": '`device="cuda"` copies from pinned memory while the model computes; leave it out',
    "persistent_workers": "threads and processes stay until `close()`; leave it out",
    "prefetch_factor": "a fixed set of buffers is filled ahead; leave it out",
    "sampler": "`shuffle=` chooses the order and a rank reads its share, `shuffle=Weighted(weights)` draws by weight; "
    "`dataset.select(positions)` takes some samples, also several times",
    "batch_sampler": "`shuffle=` chooses the order, `shuffle=ClassBatches(classes, samples)` batches by class; with "
    "batches of your own take a plain DataLoader over the PackedDataset",
    "generator": "`seed=` decides order and augmentation, whatever the workers",
    "worker_init_fn": "random numbers of Python code depend on `seed`, epoch and step, not on workers; leave it out",
    "multiprocessing_context": "processes start as `multiprocessing.set_start_method` says; leave it out",
    "in_order": "batches always come in the order of the plan; leave it out",
}


# Arguments of other objects that are given to a FastLoader, and what those of a batch are called there.
_OF_DATASET = ("read", "check", "on_damage", "cache_dir", "split", "fields", "decode", "remote")
_OF_BATCH = {"pad_to": "multiple", "group_by": "group_by"}
_OF_OTHERS = (*_OF_DATASET, *_OF_BATCH, "timeout")


def reject_unknown_arguments(words: Mapping[str, Any], accepted: Collection[str], given: Mapping[str, Any]) -> None:
    """Raises OptionError for arguments that a loader does not have, all of them in one message.

    It says what replaces an argument of `DataLoader`, to which object an argument belongs and what to type, and which
    argument a misspelt one resembles most.

    Args:
        words: arguments by name.
        accepted: names of those that the loader has.
        given: arguments by name as far as they are known.
    """
    unknown = {word: value for word, value in words.items() if word not in accepted}
    said = _of_others(unknown, given)
    said += [f"{word}=: {_OF_DATALOADER[word]}." for word in unknown if word in _OF_DATALOADER]
    strange = [word for word in unknown if word not in _OF_OTHERS and word not in _OF_DATALOADER]
    near = {word: nearest_name(word, [*accepted, *_OF_OTHERS, *_OF_DATALOADER]) for word in strange}
    for word, meant in near.items():
        if meant in accepted:
            said.append(f"{word}=. Did you mean {meant}=?")
        elif meant in _OF_DATALOADER:
            said.append(f"{word}=. Did you mean {meant}=? {_OF_DATALOADER[meant]}.")
        elif meant:
            (instead,) = _of_others({meant: unknown[word]}, given)
            said.append(f"{word}=. Did you mean {instead}")
    if lost := ", ".join(f"{word}=" for word, meant in near.items() if not meant):
        said.append(f"{lost}. `help(fastload.FastLoader)` lists those it has.")
    if said:
        raise OptionError(f"FastLoader has no argument {' It has no argument '.join(said)}")


def _of_others(unknown: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Returns for each object that some of the arguments belong to their names, and what to type."""

    def typed(names: Collection[str]) -> str:
        return ", ".join(f"{_OF_BATCH.get(name, name)}={unknown[name]!r}" for name in names)

    empty = [name for name in ("cache_dir", *_OF_BATCH, "timeout") if unknown.get(name, 0) is None]
    said = [(empty, "leave it out, as None says nothing")] if empty else []
    unknown = {name: value for name, value in unknown.items() if name not in empty}
    source = given.get("source", "")
    packed = isinstance(source, (str, os.PathLike, list, tuple, PackedDataset, Subset))
    python = "" if packed else type(source).__name__
    if names := [name for name in _OF_DATASET if name in unknown]:
        path = os.fspath(source) if source and isinstance(source, (str, os.PathLike)) else None
        in_folder = "cache_dir" in names or (path is not None and is_unpacked(Path(path)))
        first = repr(path) if path is not None else "..."
        make = "PackedDataset.from_folder" if in_folder else "PackedDataset"
        line = f"give FastLoader({make}({first}, {typed(names)}), ...)"
        said.append((names, f"that is for packed files, and {python} reads its own; leave it out" if python else line))
    if names := [name for name in _OF_BATCH if name in unknown]:
        form = given.get("batch")
        kind = "List" if (form == "list" or isinstance(form, List)) and "pad_to" not in names else "Pad"
        grouped = form.group_by if isinstance(form, (List, Pad)) and "group_by" not in names else None
        more = f", group_by={grouped!r}" if grouped is not None else ""
        line = f"give batch={kind}({typed(names)}{more})"
        no_sizes = f"that is for images of a packed file, and {python} makes samples of one size; leave it out"
        said.append((names, no_sizes if python else line))
    if "timeout" in unknown:
        number = given.get("workers")
        number = number.number if isinstance(number, Workers) else number
        first = f"{number!r}, " if number is not None else ""
        said.append((["timeout"], f"give workers=Workers({first}timeout={unknown['timeout']!r})"))
    return [f"{', '.join(f'{name}=' for name in names)}: {instead}." for names, instead in said]


def is_meant_as_argument(word: str, accepted: Collection[str]) -> bool:
    """Whether a word is an argument of torch's `DataLoader` or of a dataset, or nearly one that a loader has."""
    return word in _OF_DATALOADER or word in _OF_OTHERS or bool(nearest_name(word, accepted, cutoff=0.85))
