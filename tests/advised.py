"""Advice in what commands print: whether it is given, its values, and which test tries or models which."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from string import Formatter
from typing import Any

import pytest

from fastload.system.advice import ADVICE

_heard: set[str] = set()


def given(name: str, text: str) -> dict[str, str] | None:
    """Returns the values of an advice in a text, whatever its line breaks; None where it is not in it."""
    pattern, known = "", set[str]()
    parts = [part for part in Formatter().parse(" ".join(ADVICE[name].split())) if any(part[:2])]
    for number, (literal, field, *_) in enumerate(parts, 1):
        pattern += re.escape(literal)
        if field in known:
            pattern += f"(?P={field})"
        elif field is not None:
            pattern += f"(?P<{field}>{'.*?' if number < len(parts) else '[^ ;,:]*'})"
            known.add(field)
    found = re.search(pattern, " ".join(text.split()))
    return None if found is None else found.groupdict()


def hear(name: str, text: str) -> dict[str, str]:
    """Returns the values of an advice that has to be in a text."""
    found = given(name, text)
    assert found is not None, f"{name}: not in {text}"
    _heard.add(name)
    return found


def tries(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a test that provokes these advices, does what they say, and looks at what comes of it."""
    return _gives(names)


def models(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a test that provokes these advices with figures, and judges again figures as they are once it is done."""
    return _gives(names)


def _gives(names: tuple[str, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def mark(test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)
        def run(*args: Any, **options: Any) -> None:
            _heard.clear()
            test(*args, **options)
            assert set(names) <= _heard, f"not given: {set(names) - _heard}"

        return run

    return mark


def modelled(*names: str, of: Any) -> Any:
    """Returns a case of such a test with two parameters: the advices that it provokes, and `of` what."""
    return pytest.param(names, of, id=names[0])
