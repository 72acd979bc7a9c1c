"""Names places: of a class or function, and where a thread is, the user's line and the call that takes the time."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterator
from typing import Any

OUTWARD = (b"nanosleep", b"unix_stream", b"wait_woken", b"wait_data", b"inet_", b"tcp_", b"skb_", b"poll", b"do_select")
"""Kernel functions (`/proc/PID/wchan`) in which a thread sleeps, or waits for a socket, and for no disk and no lock."""

TIMED = "__fastload__"
"""The attribute of a wrapped function that holds what it wraps."""

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep

_PARTS = {"decoding": "decoding", "h5py": "reading", "reading": "reading", "collate": "collate", "waiting": "waiting"}

# Methods that a transform is called by, functions that only call others, and classes that hold a list of transforms.
_APPLIES = frozenset({"__call__", "forward", "apply", "transform", "_transform"})
_PASSES_ON = frozenset({
    "__getitem__", "__getitems__", "__next__", "__iter__", "_call_impl", "_wrapped_call_impl", "decorate_context",
    "fetch", "<listcomp>", "<genexpr>", "_at_once",
})  # fmt: skip
_HOLDERS = frozenset({"Compose", "Sequential", "RandomApply", "RandomChoice", "RandomOrder", "OneOf", "SomeOf"})


def _frames(frame: Any) -> Iterator[Any]:
    """Yields a thread's frames, innermost first, without those that a forked worker has from its parent."""
    while frame is not None and frame.f_code.co_name != "_worker_loop":
        yield frame
        frame = frame.f_back


def is_packaged(name: str) -> bool:
    """Returns whether a file of code belongs to an installed package, to Python or to fastload."""
    return "site-packages" in name or "dist-packages" in name or name.startswith((_STDLIB, _OURS, "<frozen"))


def _line_of(frame: Any) -> str:
    code = frame.f_code
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"


def user_line(frame: Any) -> str:
    """Returns `function (file:line)` of the innermost frame that is not of an installed package; "" if none is."""
    return next((_line_of(one) for one in _frames(frame) if not is_packaged(one.f_code.co_filename)), "")


def place_of(frame: Any) -> tuple[str, str, str]:
    """Returns `user_line`, the part of making a batch that the thread is at, and the call that takes the time.

    The part is a timed call's, otherwise `transform`. The call is the outermost library call inside the user's line
    that does not only pass on to others, such as `RandomResizedCrop` or `PIL.Image.resize`. Where the line calls a
    function written in C, it is as the line writes it; else the user's function.
    """
    part, timed, users = "", None, None
    inside = []
    for one in _frames(frame):
        code = one.f_code
        if not is_packaged(code.co_filename):
            users = users or one
        elif code.co_filename.startswith(_OURS):
            if code.co_name == "timed_call" and not part:
                wrapped = one.f_locals
                part, timed = _PARTS.get(wrapped.get("part", ""), ""), wrapped.get("call")
        elif users is None:
            inside.append(one)
    line = _line_of(users) if users is not None else ""
    if part and part != "collate":
        return line, part, _name_of_function(timed)
    call = next(filter(None, map(_name_of_frame, reversed(inside))), "")
    if not call and users is not None:
        call = _written_call(users) or getattr(users.f_code, "co_qualname", users.f_code.co_name)
    return line, part or "transform", call


def _name_of_frame(frame: Any) -> str:
    """Returns the name of the work that a library's frame does; "" if it only calls others."""
    code = frame.f_code
    if code.co_name in _PASSES_ON:
        return ""
    owner = ""
    if code.co_varnames[:1] == ("self",):
        owner = type(frame.f_locals.get("self")).__name__
        if owner in _HOLDERS:
            return ""
        if code.co_name in _APPLIES:
            return owner
    module = frame.f_globals.get("__name__", "")
    return (
        ""
        if module.startswith(("torch.utils.data", "threading", "concurrent"))
        else _dotted(module, owner, code.co_name)
    )


def _name_of_function(function: Any) -> str:
    owner, _, name = getattr(function, "__qualname__", "").rpartition(".")
    return _dotted(getattr(function, "__module__", None) or "", owner, name)


def _dotted(module: str, owner: str, name: str) -> str:
    """Returns `PIL.Image.resize` of Image.resize in PIL.Image, without modules whose names are private."""
    words = [word for word in module.split(".") if not word.startswith("_")]
    if owner and owner not in words[-1:]:
        words.append(owner)
    return ".".join([*words, name])


_written: dict[tuple[Any, int], str] = {}


def _written_call(frame: Any) -> str:
    """Returns the function that a frame is calling, as its line of code writes it, such as `np.sqrt`; "": not known.

    The interpreter knows where in the line it is, from Python 3.11 on.
    """
    code, at = frame.f_code, frame.f_lasti
    if (code, at) not in _written:
        _written[code, at] = _read_call(code, at) if hasattr(code, "co_positions") else ""
    return _written[code, at]


def _read_call(code: Any, at: int) -> str:
    positions = list(code.co_positions())
    first, last, begin, end = positions[at // 2] if 0 <= at // 2 < len(positions) else (None,) * 4
    text = linecache.getline(code.co_filename, first) if first else ""
    if begin is None or not text.isascii():
        return ""
    text = text[begin : end if first == last else None].rstrip()
    depth = 0
    for place in range(len(text) - 1, -1, -1) if first == last and text.endswith(")") else ():
        depth += (text[place] == ")") - (text[place] == "(")
        if not depth:
            text = text[:place]
            break
    else:
        text = text.partition("(")[0] if first != last else ""
    found = re.search(r"[A-Za-z_][\w.]*$", text)
    return found[0].removeprefix("self.") if found else ""


def place(thing: Any, root: str = "") -> str:
    """Returns `name (file:line)` of a class or function, as far as it is known; of a library's, the folder instead."""
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    getting = getattr(thing, "__getitem__", None)
    if getattr(getting, "__module__", "") == "torch.utils.data.dataset":  # of a dataset that is only iterated
        getting = getattr(thing, "__iter__", None)
    code = getattr(thing, "__code__", None) or getattr(getattr(getting, TIMED, getting), "__code__", None)
    if not code or is_packaged(code.co_filename):
        return f"{name} of {root}" if root else str(name)
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
