"""Asks again, from another connection, for bytes that are not what was packed: `agreed`.

A bit that flips on the way, in a proxy, or in a server's memory is another one the next time. An object that is damaged
gives the same bytes again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from fastload.errors import RemoteError

ResultT = TypeVar("ResultT")

_MOST_ANSWERS = 4

_log = logging.getLogger("fastload")
_warned: set[str] = set()  # servers and datasets of which it was said in this process


def agreed(
    url: str,
    whose: str,
    fetch: Callable[[bool], ResultT],
    problem: Callable[[ResultT], Exception | None],
    digest: Callable[[ResultT], int],
) -> tuple[ResultT, Exception | None]:
    """Returns an undamaged answer; or an answer that came twice the same, and the problem with it.

    Args:
        url: of the object, as messages show it.
        whose: URL of the dataset, of which the log says it once.
        fetch: returns an answer; True: by another connection than those so far.
        problem: returns the problem with an answer.
        digest: returns a number that two answers share if their bytes are the same.

    Raises:
        RemoteError: each answer is another one, and none is right.
    """
    seen = set[int]()
    for _ in range(_MOST_ANSWERS):
        found = fetch(bool(seen))
        wrong = problem(found)
        if wrong is None:
            if seen:
                note(whose)
            return found, None
        if (number := digest(found)) in seen:
            return found, wrong
        seen.add(number)
    raise RemoteError(
        f"{url}: was asked for {_MOST_ANSWERS} times, and each answer was another one; none is what was packed. The "
        f"network, a proxy or a server changes bytes: read it over https://, or from another machine."
    ) from wrong


def note(whose: str) -> None:
    """Says once that bytes changed on their way, and came right when they were asked for again."""
    if whose not in _warned:
        _warned.add(whose)
        _log.warning(
            "%s: bytes came changed, and right when they were asked for again: the network, a proxy or a server flips "
            "bits. Nothing of it was used. This is said once.", whose,
        )  # fmt: skip
