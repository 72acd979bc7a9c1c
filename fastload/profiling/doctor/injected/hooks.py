"""Wraps functions of torch, Pillow, h5py and others when they are imported, and puts everything back."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from .batch_making import fetching, look
from .event_file import clock, events, note_fault
from .loop_side import asking, gpu, iterating, loops
from .timed_calls import DECODING, H5, LOCK, READING, metering, passing, patch, thread, timed, unpatch

# What is timed by name when its module is imported: module -> (attribute, as what).
_CALLS: dict[str, list[tuple[str, str]]] = {
    "PIL.Image": [("open", DECODING), ("Image.convert", DECODING), ("Image.tobytes", DECODING)],
    "PIL.ImageFile": [("ImageFile.load", DECODING)],
    "cv2": [("imread", DECODING), ("imdecode", DECODING)],
    "simplejpeg": [("decode_jpeg", DECODING)],
    "turbojpeg": [("TurboJPEG.decode", DECODING)],
    "torchvision.io.image": [(n, DECODING) for n in ("read_image", "decode_image", "decode_jpeg", "decode_png")],
    "imageio.v2": [("imread", DECODING)],
    "imageio.v3": [("imread", DECODING)],
    "zlib": [("decompress", DECODING)],
    "bz2": [("decompress", DECODING)],
    "lzma": [("decompress", DECODING)],
    "numpy.lib.npyio": [("load", READING), ("fromfile", READING)],
    "numpy": [("load", READING), ("fromfile", READING)],
    "h5py._hl.dataset": [
        ("Dataset." + name, H5)
        for name in ("__getitem__", "__setitem__", "read_direct", "write_direct", "resize", "flush")
    ],
    "multiprocessing.synchronize": [("SemLock.__enter__", LOCK)],
    "fcntl": [("flock", LOCK), ("lockf", LOCK)],
}


def _on_calls(module: Any) -> None:
    for path, part in _CALLS.get(module.__name__, ()):
        owner = module
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent, None)
        original = getattr(owner, name, None)
        if original is not None and not hasattr(original, "__fastload__"):
            patch(owner, name, timed(original, part))
    if module.__name__ == "multiprocessing.synchronize":
        _time_acquire(module)


def _time_acquire(module: Any) -> None:
    original = module.SemLock._make_methods

    @functools.wraps(original)
    def make_methods(self: Any) -> None:
        original(self)
        self.acquire = timed(self._semlock.acquire, LOCK)

    patch(module.SemLock, "_make_methods", make_methods)


def _on_fetch(module: Any) -> None:
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        fetcher = getattr(module, name)
        patch(fetcher, "fetch", fetching(fetcher.fetch))


def _on_dataloader(module: Any) -> None:
    patch(module.DataLoader, "__iter__", iterating(module.DataLoader.__iter__))
    patch(module._BaseDataLoaderIter, "__next__", asking(module._BaseDataLoaderIter.__next__))
    torch = sys.modules["torch"]
    cuda = getattr(torch.version, "cuda", None)
    gpu.cuda = getattr(torch, "cuda", None) if cuda else None
    events.write({"e": "torch", "version": str(torch.__version__), "cuda": str(cuda or "")})


def _on_fastload(module: Any) -> None:
    original = module.FastLoader.iterate

    @functools.wraps(original)
    def iterate(self: Any, probe: Any = None) -> Any:
        if probe is None and events.folder and thread.asked is None:
            probe = sys.modules["fastload.timing.probe"].Probe(clock)
        iterator = begin_epoch(self, probe)
        state = iterator.__dict__.get("_fastload_doctor")
        if state is not None:
            state.probe = probe
        return iterator

    begin_epoch = iterating(original)
    patch(module.FastLoader, "iterate", iterate)


def _on_fastload_iteration(module: Any) -> None:
    patch(module.Iteration, "__next__", asking(module.Iteration.__next__))


def _on_reduction(module: Any) -> None:
    pickler = module.ForkingPickler
    patch(pickler, "loads", staticmethod(passing(pickler.loads, into=True)))
    patch(pickler, "dumps", classmethod(passing(vars(pickler)["dumps"].__func__, into=False)))


def _on_connection(module: Any) -> None:
    base = module._ConnectionBase
    patch(base, "recv_bytes", passing(base.recv_bytes, into=True))
    patch(base, "send_bytes", passing(base.send_bytes, into=False))


_HOOKS: dict[str, Callable[[Any], None]] = {
    **dict.fromkeys(_CALLS, _on_calls),
    "torch.utils.data._utils.fetch": _on_fetch,
    "torch.utils.data.dataloader": _on_dataloader,
    "multiprocessing.reduction": _on_reduction,
    "multiprocessing.connection": _on_connection,
    "fastload.loader.loader": _on_fastload,
    "fastload.loader.iteration": _on_fastload_iteration,
}


def _run_hook(module: Any) -> None:
    try:
        _HOOKS[module.__name__](module)
    except Exception:  # noqa: BLE001  # another version of that package: not metered, and said
        note_fault("hook of " + module.__name__)


class _Finder:
    """Finds modules as the others on sys.meta_path do, and has those of `_HOOKS` changed right after they ran."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _HOOKS:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
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
    for name in list(_HOOKS):
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
    loops.states.clear()
    return events.record_into(folder)


def _in_child() -> None:
    """Resets a forked process: it has no loop, no threads and no locks of its parent."""
    metering.reset()
    thread.__init__()  # type: ignore[misc]
    loops.current = None
    look(0.0)
