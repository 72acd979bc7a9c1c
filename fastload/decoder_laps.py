"""Tells decoding from what a user's dataset does beside it, in a worker process that is measured."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from PIL import ImageFile

from fastload.stopwatch import current

_DECODERS = {
    "simplejpeg": ("decode_jpeg",),
    "cv2": ("imdecode", "imread"),
    "torchvision.io": ("decode_image", "decode_jpeg", "decode_png", "read_image"),
    "torchvision.io.image": ("decode_image", "decode_jpeg", "decode_png", "read_image"),
}
_MARK = "_fastload_lap"


def watch_decoders() -> None:
    """Makes Pillow's decoding, and that of other packages imported so far, a lap of the thread's stopwatch.

    Names that a module took out of those packages earlier are not seen; what they decode counts as transform.
    """
    if not hasattr(ImageFile.ImageFile.load, _MARK):
        ImageFile.ImageFile.load = _timed(ImageFile.ImageFile.load, only=_undecoded)  # type: ignore[method-assign]
    for name, functions in _DECODERS.items():
        module = sys.modules.get(name)
        for function in functions:
            found = getattr(module, function, None)
            if found is not None and not hasattr(found, _MARK):
                setattr(module, function, _timed(found))


def _undecoded(image: Any, *_: Any, **__: Any) -> bool:
    return bool(getattr(image, "tile", None))


def _timed(decode: Callable[..., Any], *, only: Callable[..., bool] | None = None) -> Callable[..., Any]:
    @functools.wraps(decode)
    def timed(*words: Any, **options: Any) -> Any:
        stopwatch = current()
        if stopwatch is None or (only is not None and not only(*words, **options)):
            return decode(*words, **options)
        stopwatch.lap("reading")
        try:
            return decode(*words, **options)
        finally:
            stopwatch.lap("decoding")

    setattr(timed, _MARK, True)
    return timed
