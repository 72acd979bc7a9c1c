"""Arguments that a class or function does not have: one error for all of them, which says what to type instead."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar, ParamSpec, Self, TypeVar

from fastload.errors import OptionError

P = ParamSpec("P")
R = TypeVar("R")


def nearest_name(word: str, names: Collection[str], *, cutoff: float = 0.6) -> str:
    """Returns the name that a misspelt one resembles most; "" if it resembles none."""
    return (difflib.get_close_matches(word.lower(), names, 1, cutoff) or [""])[0]


def reject_unknown(owner: str, unknown: Sequence[str], accepted: Collection[str], instead: Mapping[str, str]) -> None:
    """Raises OptionError for names of arguments that a class or function does not have, if there are any.

    Args:
        owner: its name.
        unknown: these names.
        accepted: those that it has.
        instead: what to do instead of giving some of the unknown ones, as one or more sentences.
    """
    said = []
    for word in unknown:
        near = nearest_name(word, [*accepted, *instead])
        hint = f"Did you mean {near}=?" if near else f"It has {', '.join(f'{name}=' for name in accepted)}."
        said.append(f"{owner} has no argument {word}=. {instead.get(word) or hint}")
        if near in instead and word not in instead:
            said.append(instead[near])
    if said:
        raise OptionError(" ".join(said))


def checks_names(instead: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function, or an `__init__`, to raise OptionError for unknown arguments; see `reject_unknown`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        accepted = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*positional: P.args, **words: P.kwargs) -> R:
            unknown = [word for word in words if word not in accepted]
            reject_unknown(function.__qualname__.removesuffix(".__init__"), unknown, accepted, instead)
            return function(*positional, **words)

        return checked

    return decorate


class Options:
    """Base of frozen dataclasses of options, which say what replaces an argument that they do not have."""

    _INSTEAD: ClassVar[Mapping[str, str]] = {}

    def __new__(cls, *positional: object, **words: object) -> Self:
        """Raises OptionError for unknown arguments; see `reject_unknown`."""
        accepted = list(inspect.signature(cls.__init__).parameters)[1:]
        reject_unknown(cls.__name__, [word for word in words if word not in accepted], accepted, cls._INSTEAD)
        return super().__new__(cls)
