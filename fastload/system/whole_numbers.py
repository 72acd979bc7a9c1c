"""Checks of whole numbers that users pass as options. No torch here."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np

from fastload.errors import OptionError


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an int, Python's or NumPy's, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_whole(name: str, value: object, *, least: int, others: str = "") -> None:
    """Raises OptionError unless the option `name` is a whole number of at least `least`.

    `others` tells the message of other accepted values, such as ' or None'.
    """
    if not is_whole(value) or value < least:
        raise OptionError(f"{name}={value!r}: give a whole number, {least} or more{others}")
