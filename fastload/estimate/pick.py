"""Which store to pick, from what each would take and give, and why, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastload.chunks import format_bytes

FITS = 0.8
"""Share of the free memory that a file may fill to be read from there."""
CLOSE = 0.9
"""From this share of the best rate on, a store counts as good as the best, and less room decides."""
WORTH_LOSS = 1.5
"""How many times faster a store that loses something must be than the best that loses nothing."""
FEW = 8
"""Samples of which too few tell anything of rates."""


@dataclass(frozen=True)
class StoreEstimate:
    """What a dataset would be in one store.

    Attributes:
        store: as `--store` takes it, "raw, zstd" for pixels that zstd compresses, or "as it is".
        bytes: of the images and masks of all rows; chunks of a byte store leave a few percent more free.
        warm_per_s: images a second from memory, decoded in full size by all CPUs; transforms come on top.
        disk_per_s: images a second while they come from the disk; None where its rate is not known.
        encodings: how many rows of the sample are stored in which encoding.
        loses: rows are encoded anew as JPEG, which loses a little of them.
    """

    store: str
    bytes: int
    warm_per_s: float
    disk_per_s: float | None
    encodings: dict[str, int]
    loses: bool


def pick_store(stores: Sequence[StoreEstimate], *, sampled: int, free_memory: int, room: int | None) -> tuple[str, str]:
    """The store that is expected to be read fastest, and a sentence that says why.

    What fits in memory is read from the disk once, then at the rate of memory; all else at the rate of the disk. Of
    few samples the first store is picked where it fits: rates of so few say nothing.

    Args:
        stores: at least one, the first of them as the file is, or raw.
        sampled: images by which the rates were measured.
        free_memory: bytes that the page cache may fill.
        room: bytes free on the disk; None: the file is there already.
    """
    smallest = min(stores, key=lambda store: store.bytes)
    possible = [store for store in stores if room is None or store.bytes <= room] or [smallest]
    fitting = [store for store in possible if _fits(store, free_memory)]
    if sampled < FEW and stores[0] in fitting:
        return stores[0].store, (
            f"{stores[0].store}: its {format_bytes(stores[0].bytes)} fit in the {format_bytes(free_memory)} of free "
            f"memory; rates of {sampled} image{'s' if sampled > 1 else ''} are too uncertain to compare."
        )
    known = [store for store in possible if store in fitting or store.disk_per_s is not None]
    if not known:
        chosen = min(possible, key=lambda store: (store.loses, store.bytes))
        return chosen.store, (
            f"{chosen.store}: nothing fits in the {format_bytes(free_memory)} of free memory, and it is not known how "
            f"fast this disk is read; of what loses nothing it is the smallest, {format_bytes(chosen.bytes)}."
        )
    rates = {store.store: store.warm_per_s if store in fitting else store.disk_per_s or 0.0 for store in known}
    lossless = max((rates[store.store] for store in known if not store.loses), default=0.0)
    worth = [store for store in known if not store.loses or rates[store.store] >= WORTH_LOSS * lossless]
    best = max(rates[store.store] for store in worth)
    close = [store for store in worth if rates[store.store] >= CLOSE * best]
    # From memory all are fast: the first is the simplest, and costs nothing but room that is there.
    chosen = min(
        close, key=lambda store: (store not in fitting, stores.index(store) if store in fitting else store.bytes)
    )
    return chosen.store, _why(chosen, rates, known, fitting, free_memory) + _no_room(stores, possible, room)


def _why(
    chosen: StoreEstimate,
    rates: dict[str, float],
    known: Sequence[StoreEstimate],
    fitting: Sequence[StoreEstimate],
    free_memory: int,
) -> str:
    size, rate = format_bytes(chosen.bytes), f"{rates[chosen.store]:,.0f} images/s"
    others = sorted((store for store in known if store is not chosen), key=lambda store: -rates[store.store])
    told = f" ({_told(others[0], rates, fitting)})" if others else ""
    if chosen in fitting:
        memory = format_bytes(free_memory)
        return f"{chosen.store}: its {size} fit in the {memory} of free memory, and from there come {rate}{told}."
    loss = "; making JPEGs loses a little" if chosen.loses else ""
    return (
        f"{chosen.store}: its {size} do not fit in the {format_bytes(free_memory)} of free memory, and over this disk "
        f"come {rate}{told}{loss}."
    )


def _told(store: StoreEstimate, rates: dict[str, float], fitting: Sequence[StoreEstimate]) -> str:
    where = "from memory" if store in fitting else "over this disk"
    return f"{store.store} {rates[store.store]:,.0f} {where}"


def _no_room(stores: Sequence[StoreEstimate], possible: Sequence[StoreEstimate], room: int | None) -> str:
    left_out = [f"{store.store} ({format_bytes(store.bytes)})" for store in stores if store not in possible]
    if not left_out or room is None:
        return ""
    return f" No room on the disk, where {format_bytes(room)} are free, for {', '.join(left_out)}."


def _fits(store: StoreEstimate, free_memory: int) -> bool:
    return store.bytes <= FITS * free_memory
