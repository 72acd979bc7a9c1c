"""Wraps functions of torch, Pillow, h5py and others when they are imported, and puts everything back."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from .batch_making import fetching, looker
from .event_file import clock, events, note_fault
from .loop_side import LoaderState, asking, gpu, iterating
from .timed_calls import DECODING, H5, LOCK, READING, metering, passing, patch, thread, timed, unpatch

# Functions of a module that are timed, as what. Some releases have only some of them.
_CALLS: dict[str, dict[str, str]] = {
    "PIL.Image": dict.fromkeys(("open", "Image.convert", "Image.tobytes"), DECODING),
    "PIL.ImageFile": {"ImageFile.load": DECODING},
    "cv2": {"imread": DECODING, "imdecode": DECODING},
    "simplejpeg": {"decode_jpeg": DECODING},
    "turbojpeg": {"TurboJPEG.decode": DECODING},
    "torchvision.io.image": dict.fromkeys(("read_image", "decode_image", "decode_jpeg", "decode_png"), DECODING),
    "imageio.v2": {"imread": DECODING},
    "imageio.v3": {"imread": DECODING},
    "zlib": {"decompress": DECODING},
    "bz2": {"decompress": DECODING},
    "lzma": {"decompress": DECODING},
    "numpy.lib.npyio": {"load": READING, "fromfile": READING},
    "numpy": {"load": READING, "fromfile": READING},
    "h5py._hl.dataset": dict.fromkeys(
        ["Dataset." + name for name in "__getitem__ __setitem__ read_direct write_direct resize flush".split()], H5
    ),
    "multiprocessing.synchronize": {"SemLock.__enter__": LOCK},
    "fcntl": {"flock": LOCK, "lockf": LOCK},
}


def _making_methods(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `SemLock._make_methods`, which gives each lock its own `acquire`."""

    @functools.wraps(original)
    def make_methods(self: Any) -> None:
        original(self)
        self.acquire = timed(self._semlock.acquire, LOCK)

    return make_methods


def _iterating_probed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `FastLoader.iterate`, to have each batch reported to a probe."""
    begin_epoch = iterating(original)

    @functools.wraps(original)
    def iterate(self: Any, probe: Any = None) -> Any:
        if probe is None and events.folder and thread.asked is None:
            probe = sys.modules["fastload.timing.probe"].Probe(clock)
        iterator = begin_epoch(self, probe)
        state = iterator.__dict__.get("_fastload_doctor")
        if state is not None:
            state.probe = probe
        return iterator

    return iterate


_into, _out = functools.partial(passing, part="into"), functools.partial(passing, part="out")

# Functions of a module, and what wraps them.
_WRAPS: dict[str, dict[str, Callable[..., Any]]] = {
    "multiprocessing.synchronize": {"SemLock._make_methods": _making_methods},
    "torch.utils.data._utils.fetch": {
        "_MapDatasetFetcher.fetch": fetching,
        "_IterableDatasetFetcher.fetch": fetching,
    },
    "torch.utils.data.dataloader": {"DataLoader.__iter__": iterating, "_BaseDataLoaderIter.__next__": asking},
    "multiprocessing.reduction": {"ForkingPickler.loads": _into, "ForkingPickler.dumps": _out},
    "multiprocessing.connection": {"_ConnectionBase.recv_bytes": _into, "_ConnectionBase.send_bytes": _out},
    "fastload.loader.loader": {"FastLoader.iterate": _iterating_probed},
    "fastload.loader.iteration": {"Iteration.__next__": asking},
}
_HOOKED = {*_CALLS, *_WRAPS}


def _wrap(module: Any, path: str, wrap: Callable[..., Any]) -> None:
    *parents, name = path.split(".")
    owner = functools.reduce(getattr, parents, module)
    original = getattr(owner, name)
    if hasattr(original, "__fastload__"):
        return  # another module's function, wrapped there
    if isinstance(vars(owner).get(name), classmethod):
        patch(owner, name, classmethod(wrap(original.__func__)))
    elif isinstance(owner, type) and isinstance(original, types.BuiltinFunctionType):
        patch(owner, name, staticmethod(wrap(original)))  # as it was: such a function does not become a method
    else:
        patch(owner, name, wrap(original))


def _run_hook(module: Any) -> None:
    name = module.__name__
    try:
        for path, part in _CALLS.get(name, {}).items():
            try:
                _wrap(module, path, functools.partial(timed, part=part))
            except AttributeError:
                pass
        for path, wrap in _WRAPS.get(name, {}).items():
            _wrap(module, path, wrap)
        if name == "torch.utils.data.dataloader":
            torch = sys.modules["torch"]
            cuda = getattr(torch.version, "cuda", None)
            gpu.cuda = getattr(torch, "cuda", None) if cuda else None
            events.write({"e": "torch", "version": str(torch.__version__), "cuda": str(cuda or "")})
    except Exception:  # noqa: BLE001  # another version of that package: not metered, and said
        note_fault("hook of " + name)


class _Finder:
    """Finds modules as the others on sys.meta_path do, and has those of `_HOOKED` changed right after they ran."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _HOOKED:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if finder is not self and find is not None else None
            if spec is None:
                continue
            loader = spec.loader
            # A class loads all modules that are built in; those are wrapped by `install`.
            if hasattr(loader, "exec_module") and not isinstance(loader, type):
                execute = loader.exec_module

                def run(module: Any, _execute: Callable[[Any], None] = execute) -> None:
                    _execute(module)
                    _run_hook(module)

                try:
                    loader.exec_module = run
                except (AttributeError, TypeError):
                    pass  # a loader of builtin modules
            return spec
        return None


_finder: Any = _Finder()


def is_installed() -> bool:
    """Whether functions are wrapped in this process."""
    return _finder in sys.meta_path


def install() -> None:
    """Wraps functions of modules that are imported already, and of the others when they are imported."""
    for name in sorted(_HOOKED):
        if name in sys.builtin_module_names:
            __import__(name)
        if name in sys.modules:
            _run_hook(sys.modules[name])
    sys.meta_path.insert(0, _finder)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_in_child)


def uninstall() -> None:
    """Puts everything back as it was before `install`."""
    unpatch()
    if is_installed():
        sys.meta_path.remove(_finder)


def record_into(folder: str) -> str:
    """Records into this folder from now on, or stops with an empty name; returns the folder used until now."""
    metering.active = False
    LoaderState.known.clear()
    return events.record_into(folder)


def _in_child() -> None:
    """Resets a forked process: it has no loop, no threads and no locks of its parent."""
    metering.reset()
    thread.__init__()  # type: ignore[misc]
    LoaderState.known.clear()
    looker.ident = 0
