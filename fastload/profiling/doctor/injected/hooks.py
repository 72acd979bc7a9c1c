"""Wraps functions of torch, Pillow, h5py and others when they are imported, and puts everything back."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from . import worker_trial
from .batch_making import fetching, looker
from .event_file import events, note_fault
from .loop_side import LoaderState, asking, asking_itself, gpu, iterating, training
from .timed_calls import (
    DECODING,
    H5,
    LOCK,
    READING,
    WAITING,
    decoding,
    metering,
    noted,
    passing,
    patch,
    thread,
    timed,
    unpatch,
    waiting,
)  # fmt: skip


def _making_methods(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `SemLock._make_methods`, which gives each lock its own `acquire`."""

    @functools.wraps(original)
    def make_methods(self: Any) -> None:
        original(self)
        self.acquire = timed(self._semlock.acquire, LOCK)

    return make_methods


_into, _out = functools.partial(passing, part="into"), functools.partial(passing, part="out")

_DECODES = "decodes"

# Functions of a module, and what wraps them; or the part as which they are timed, of those that not all releases have.
_HOOKS: dict[str, dict[str, str | Callable[..., Any]]] = {
    "PIL.Image": dict.fromkeys(("open", "Image.convert", "Image.tobytes"), DECODING),
    "PIL.ImageFile": {"ImageFile.load": decoding},
    "cv2": {"imread": _DECODES, "imdecode": _DECODES},
    "simplejpeg": {"decode_jpeg": _DECODES},
    "turbojpeg": {"TurboJPEG.decode": _DECODES},
    "torchvision.io.image": dict.fromkeys(("read_image", "decode_image", "decode_jpeg", "decode_png"), _DECODES),
    **{name: {"imread": _DECODES} for name in ("imageio.v2", "imageio.v3")},
    **{name: {"decompress": DECODING} for name in ("zlib", "bz2", "lzma")},
    **{name: {"load": READING, "fromfile": READING} for name in ("numpy", "numpy.lib.npyio")},
    "h5py._hl.dataset": dict.fromkeys(
        ["Dataset." + name for name in "__getitem__ __setitem__ read_direct write_direct resize flush".split()], H5
    ),
    "time": {"sleep": waiting},
    "socket": {f"socket.{name}": WAITING for name in ("connect", "recv", "recv_into", "recvfrom", "recvmsg")},
    "ssl": {f"SSLSocket.{name}": WAITING for name in ("do_handshake", "read")},
    "selectors": {f"{kind}Selector.select": WAITING for kind in ("Epoll", "Kqueue")},  # in which asyncio waits
    "fcntl": {"flock": LOCK, "lockf": LOCK},
    "multiprocessing.synchronize": {"SemLock.__enter__": LOCK, "SemLock._make_methods": _making_methods},
    "multiprocessing.reduction": {"ForkingPickler.loads": _into, "ForkingPickler.dumps": _out},
    "multiprocessing.connection": {"_ConnectionBase.recv_bytes": _into, "_ConnectionBase.send_bytes": _out},
    "torch.autograd": {"backward": training},
    "torch.serialization": {"save": noted, "load": noted},
    "torch.utils.data._utils.fetch": {f"_{kind}DatasetFetcher.fetch": fetching for kind in ("Map", "Iterable")},
    "torch.utils.data.dataloader": {"DataLoader.__iter__": iterating, "_BaseDataLoaderIter.__next__": asking},
    # Loaders that are no DataLoader of torch, around one or by themselves.
    "timm.data.loader": {"PrefetchLoader.__iter__": iterating},
    "webdataset.pipeline": {"DataPipeline.__iter__": iterating},
    "fastai.data.load": {"DataLoader.__iter__": iterating},
    "nvidia.dali.plugin.pytorch": {"DALIGenericIterator.__next__": asking_itself},
    "ffcv.loader.loader": {"Loader.__iter__": iterating},
    "ffcv.loader.epoch_iterator": {"EpochIterator.__next__": asking},
    "torchdata.nodes.loader": {"LoaderIterator.next": asking_itself},
    "fastload.loader.loader": {"FastLoader.iterate": iterating},
    "fastload.loader.iteration": {"Iteration.__next__": asking},
}


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
        for path, wrap in _HOOKS[name].items():
            if isinstance(wrap, str):
                by_kind = {_DECODES: decoding, WAITING: waiting}
                with suppress(AttributeError):
                    _wrap(module, path, by_kind.get(wrap) or functools.partial(timed, part=wrap))
            else:
                _wrap(module, path, wrap)
        if name == "torch.utils.data.dataloader":
            torch = sys.modules["torch"]
            cuda = getattr(torch.version, "cuda", None)
            gpu.cuda = getattr(torch, "cuda", None) if cuda else None
            _watch_subclasses(module.DataLoader)
            events.write({"e": "torch", "version": str(torch.__version__), "cuda": str(cuda or "")})
    except Exception:  # noqa: BLE001  # another version of that package: not metered, and said
        note_fault("hook of " + name)


def _watch_subclasses(loader: Any) -> None:
    """Wraps `__iter__` of each subclass that has its own, of those to come when they are made."""

    def watch(owner: Any) -> None:
        own = vars(owner).get("__iter__")
        if isinstance(own, types.FunctionType) and not hasattr(own, "__fastload__"):
            patch(owner, "__iter__", iterating(own))

    def init_subclass(owner: type[Any], /, **words: Any) -> None:
        super(loader, owner).__init_subclass__(**words)
        watch(owner)

    patch(loader, "__init_subclass__", classmethod(init_subclass))
    found = [loader]
    for owner in found:  # grows
        watch(owner)
        found += owner.__subclasses__()


class _Finder:
    """Finds modules by the other finders of sys.meta_path, and changes the modules of `_HOOKS` right after they ran."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _HOOKS:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec: Any = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        loader: Any = getattr(spec, "loader", None)
        # A class loads all modules that are built in; those are wrapped by `install`.
        if hasattr(loader, "exec_module") and not isinstance(loader, type):
            execute = loader.exec_module

            def run(module: Any) -> None:
                execute(module)
                _run_hook(module)

            with suppress(AttributeError, TypeError):  # a loader of builtin modules
                loader.exec_module = run
        return spec


_finder: Any = _Finder()


def is_installed() -> bool:
    """Whether functions are wrapped in this process."""
    return _finder in sys.meta_path


def install() -> None:
    """Wraps functions of modules that are imported already, and of the others when they are imported."""
    for name in sorted(_HOOKS):
        if name in sys.builtin_module_names:
            __import__(name)
        if name in sys.modules:
            _run_hook(sys.modules[name])
    sys.meta_path.insert(0, _finder)
    os.register_at_fork(after_in_child=_in_child)


def uninstall() -> None:
    """Puts everything back as it was before `install`."""
    unpatch()
    sys.meta_path.remove(_finder)


def record_into(folder: str) -> str:
    """Records into this folder from now on, or stops with an empty name; returns the folder used until now."""
    metering.active = False
    LoaderState.known.clear()
    os.environ.pop(worker_trial.VARIABLE, None)
    return events.record_into(folder)


def _in_child() -> None:
    """Resets a forked process: it has no loop, no threads and no locks of its parent."""
    metering.reset()
    thread.__init__()  # type: ignore[misc]
    LoaderState.known.clear()
    looker.ident = 0
