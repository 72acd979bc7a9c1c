"""Objects as JSON and arrays, for other machines: unlike a pickle, reading them runs no code but fastload's.

Supported: numbers, texts, bytes, containers, paths, dtypes, arrays, and the dataclasses of the packages in
`_PACKAGES`, by their names. A reader that other samples share something with (`compact`) is written without it.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.remote.urls import path_of

_PACKAGES = tuple(f"fastload.{name}." for name in ("format", "images", "options", "pack", "remote", "sources"))
_STRUCTURE = "structure"


def to_bytes(value: Any) -> bytes:
    """Returns a value as an .npz: its arrays, and JSON that says where they belong; TypeError for what has none."""
    arrays: list[NDArray[Any]] = []
    text = json.dumps(_plain(value, arrays), separators=(",", ":"))
    into = io.BytesIO()
    members = {str(number): array for number, array in enumerate(arrays)}
    np.savez(into, allow_pickle=False, **members, **{_STRUCTURE: np.frombuffer(text.encode(), np.uint8)})
    return into.getvalue()


def from_bytes(data: bytes) -> Any:
    """Returns the value that `to_bytes` was given. ValueError, KeyError, TypeError: it is invalid."""
    with np.load(io.BytesIO(data), allow_pickle=False) as members:
        return _value(json.loads(members[_STRUCTURE].tobytes()), members)


def _plain(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """Returns a value in JSON; objects are dictionaries of one key, which is their kind."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, np.generic):
        arrays.append(np.array(value))
        return {"number": len(arrays) - 1}
    if isinstance(value, np.dtype):
        return {"dtype": value.str}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Path):
        return {"path": str(value)}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_plain(item, arrays) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key, arrays), _plain(item, arrays)] for key, item in value.items()]}
    kind = type(value)
    if f"{kind.__module__}.".startswith(_PACKAGES):
        if hasattr(value, "compact"):
            value = value.compact()
            kind = type(value)
        fields = value._asdict() if hasattr(value, "_asdict") else value.__getstate__()
        named = f"{kind.__module__}:{kind.__qualname__}"
        return {"object": [named, {name: _plain(item, arrays) for name, item in fields.items()}]}
    raise TypeError(f"a {kind.__module__}.{kind.__name__} cannot be sent to other machines")


def _value(plain: Any, arrays: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    match kind:
        case "array":
            return arrays[str(content)]
        case "number":
            return arrays[str(content)][()]
        case "dtype":
            return np.dtype(content)
        case "bytes":
            return base64.b64decode(content)
        case "path":
            return path_of(content)
        case "list":
            return [_value(item, arrays) for item in content]
        case "tuple":
            return tuple([_value(item, arrays) for item in content])
        case "dict":
            return {_value(key, arrays): _value(item, arrays) for key, item in content}
        case "object":
            name, fields = content
            return _class(name)(**{key: _value(item, arrays) for key, item in fields.items()})
    raise ValueError(f"{kind!r} is no kind of value")


def _class(name: str) -> Any:
    """Returns a class of fastload that holds data only, by its name; ValueError for anything else."""
    module, _, inside = name.partition(":")
    if module.startswith(_PACKAGES):
        found = getattr(import_module(module), inside, None)
        holds_data = dataclasses.is_dataclass(found) or hasattr(found, "_fields")
        if holds_data and isinstance(found, type) and found.__module__ == module:
            return found
    raise ValueError(f"{name!r} is no class of this release that holds samples")
