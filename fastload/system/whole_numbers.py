"""Checks of whole numbers that users pass as options. No torch here."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np

from fastload.errors import OptionError


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an int, Python's or NumPy's, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_whole(name: str, value: object, *, least: int, others: str = "") -> None:
    """Raises OptionError unless an option is a whole number of at least `least`.

    Args:
        name: name of the option, for the message.
        value: the user's value.
        least: smallest number accepted.
        others: other accepted values, for the message, such as ' or None'.
    """
    if not is_whole(value) or value < least:
        raise OptionError(f"{name}={value!r}: give a whole number, {least} or more{others}")
