"""What a loader says of arguments that it does not have, as torch's `DataLoader`'s, and of itself, in words."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fastload.dataset import is_unpacked
from fastload.errors import OptionError
from fastload.loader.options import List, Pad, Workers
from fastload.plan import ChunkWindow
from fastload.prefetch.loader_plan import LoaderPlan
from fastload.system.text import counted

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


# Arguments of other objects that are given to a FastLoader.
_OF_DATASET = ("read", "check", "on_damage", "cache_dir", "split", "fields", "decode", "remote")
_OF_BATCH = {"pad_to": "multiple", "group_by": "group_by"}
_OF_OTHERS = (*_OF_DATASET, *_OF_BATCH, "timeout")


def reject_unknown_arguments(words: Mapping[str, Any], accepted: Collection[str], given: Mapping[str, Any]) -> None:
    """Raises OptionError for arguments that a loader does not have: torch's `DataLoader`'s, and misspelt ones.

    Messages say what replaces an argument of `DataLoader`, to which object an argument belongs and what to type, and
    which argument a misspelt one resembles most.

    Args:
        words: arguments by name.
        accepted: names of those that the loader has.
        given: arguments by name as far as they are known.
    """
    unknown = {word: value for word, value in words.items() if word not in accepted}
    if not unknown:
        return
    known = [f"{word}=: {_OF_DATALOADER[word]}" for word in unknown if word in _OF_DATALOADER]
    if known := _of_others(unknown, given) + known:
        raise OptionError(f"FastLoader has no argument {'. It has no argument '.join(known)}.")
    word = next(iter(unknown))
    near = difflib.get_close_matches(word.lower(), accepted, n=1)
    hint = f"Did you mean {near[0]}=?" if near else "`help(fastload.FastLoader)` lists those it has."
    raise OptionError(f"FastLoader has no argument {word}=. {hint}")


def _of_others(unknown: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Returns for each object that some of the arguments belong to their names, and what to type."""

    def typed(names: Collection[str]) -> str:
        return ", ".join(f"{_OF_BATCH.get(name, name)}={unknown[name]!r}" for name in names)

    empty = [name for name in ("cache_dir", *_OF_BATCH, "timeout") if unknown.get(name, 0) is None]
    said = [(empty, "leave it out, as None says nothing")] if empty else []
    unknown = {name: value for name, value in unknown.items() if name not in empty}
    if names := [name for name in _OF_DATASET if name in unknown]:
        source = given.get("source")
        path = os.fspath(source) if isinstance(source, (str, os.PathLike)) else None
        in_folder = "cache_dir" in names or (path is not None and is_unpacked(Path(path)))
        first = repr(path) if path is not None else "..."
        make = "PackedDataset.from_folder" if in_folder else "PackedDataset"
        said.append((names, f"give FastLoader({make}({first}, {typed(names)}), ...)"))
    if names := [name for name in _OF_BATCH if name in unknown]:
        form = given.get("batch")
        kind = "List" if (form == "list" or isinstance(form, List)) and "pad_to" not in names else "Pad"
        grouped = form.group_by if isinstance(form, (List, Pad)) and "group_by" not in names else None
        more = f", group_by={grouped!r}" if grouped is not None else ""
        said.append((names, f"give batch={kind}({typed(names)}{more})"))
    if "timeout" in unknown:
        number = given.get("workers")
        number = number.number if isinstance(number, Workers) else number
        first = f"{number!r}, " if number is not None else ""
        said.append((["timeout"], f"give workers=Workers({first}timeout={unknown['timeout']!r})"))
    return [f"{', '.join(f'{name}=' for name in names)}: {instead}" for names, instead in said]


def is_meant_as_argument(word: str, accepted: Collection[str]) -> bool:
    """Whether a word is an argument of torch's `DataLoader` or of a dataset, or nearly one that a loader has."""
    known = word in _OF_DATALOADER or word in _OF_OTHERS
    return known or bool(difflib.get_close_matches(word.lower(), accepted, n=1, cutoff=0.85))


def description(options: LoaderPlan, workers: int) -> tuple[list[str], list[str]]:
    """Returns what a loader loads, and how, in a few words each; batches are counted for an epoch on this rank."""
    data, plan, steps = options.data, options.plan, options.plan.num_steps
    what = data.description()
    what += [counted(len(plan.rows), "row"), f"{steps:,} {'batch' if steps == 1 else 'batches'} of {plan.batch_size}"]
    what += ["elastic"] if plan.elastic else []
    if options.share.world_size > 1:
        what.append(f"rank {options.share.rank} of {options.share.world_size}")
        if (nodes := options.nodes) is not None:
            what.append(f"node {nodes.node_of(options.share.rank)} of {nodes.number}")
    shuffle = f"windows of {plan.shuffle.chunks} chunks" if isinstance(plan.shuffle, ChunkWindow) else plan.shuffle
    how = [f"shuffle {shuffle}" if shuffle else "in order", f"ends {plan.ends}", f"seed {plan.seed}"]
    by = ("process" if workers == 1 else "processes") if data.runs_python else "thread" + "s" * (workers > 1)
    reading = f" ({data.read_mode})" if data.read_mode else ""
    how.append(f"cached in {options.cache} memory" if options.cache else f"{workers} {by}{reading}")
    how.append(f"to {options.backend.device}" if options.backend is not None else "to host memory")
    how += [counted(len(options.transforms), "transform")] if options.transforms else []
    if options.form.kind != "stack":
        how.append(
            "a list of images" if options.form.kind == "list" else f"padded to multiples of {options.form.pad_to}"
        )
        how += ["by aspect"] if plan.groups is not None else []
    how += [f"echo {options.echo}"] if options.echo != 1 else []
    return what, how
