"""Which layers of a network get a batch's images, and of what shape: recorded during one training step."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from .event_file import events, note_fault

# Classes of torch.nn, and what they are made with.
_SLIDING = ("kernel_size", "stride", "padding")
_CONVOLUTION = ("in_channels", "out_channels", *_SLIDING, "dilation", "groups")
_KINDS = {
    "Conv2d": _CONVOLUTION,
    "ConvTranspose2d": (*_CONVOLUTION, "output_padding"),
    "BatchNorm2d": ("num_features",),
    "MaxPool2d": _SLIDING,
    "AvgPool2d": _SLIDING,
    "AdaptiveAvgPool2d": ("output_size",),
    "Linear": ("in_features", "out_features"),
    "LayerNorm": ("normalized_shape",),
}
_ELEMENTWISE = ("ReLU", "ReLU6", "LeakyReLU", "SiLU", "GELU", "Hardswish", "Sigmoid")
_MOST = 512  # layers that differ


class LayerRecorder:
    """Records the layers of modules that are given a batch's images, or others of that shape made of these.

    A failure of a module leaves the depth wrong, and what is recorded then does not count: its step has failed.
    """

    def __init__(self, loader: int, images: Any) -> None:
        self._loader, self._shape = loader, tuple(images.shape)
        self._layers: Counter[tuple[Any, ...]] = Counter()
        self._depth = self._since = 0  # of modules that are called now; the one that was given the images
        self._made: set[int] = set()  # addresses of tensors like the images, made of others, as by a generator
        self._kinds = {getattr(sys.modules["torch"].nn, kind): kind for kind in (*_KINDS, *_ELEMENTWISE)}
        module = sys.modules["torch.nn.modules.module"]
        self._hooks = (
            module.register_module_forward_pre_hook(_guarded(self._begins)),
            module.register_module_forward_hook(_guarded(self._ends)),
        )

    @staticmethod
    def of(loader: int, images: Any) -> LayerRecorder | None:
        """Returns the recorder of a step with such images; None where their memory format changes nothing."""
        torch = sys.modules["torch"]
        if not isinstance(images, torch.Tensor) or images.ndim != 4:
            return None
        if images.device.type != "cpu" or not images.is_contiguous():
            return None
        if getattr(sys.modules.get("torch._dynamo.utils"), "counters", None):
            return None  # it would be compiled again with the hooks
        return LayerRecorder(loader, images)

    def end(self) -> None:
        """Removes the hooks, and writes down what was recorded."""
        for hook in self._hooks:
            hook.remove()
        layers = [
            {"kind": kind, "arguments": dict(arguments), "shape": shape, "backward": backward, "count": count}
            for (kind, arguments, shape, backward), count in self._layers.most_common(_MOST)
        ]
        events.write({"e": "layers", "id": self._loader, "layers": layers})

    def _begins(self, module: Any, arguments: Any) -> None:
        self._depth += 1
        if not self._since:
            given = [one for one in arguments if getattr(one, "shape", None) == self._shape]
            if any(not one.requires_grad and one.data_ptr() not in self._made for one in given):
                self._since = self._depth

    def _ends(self, module: Any, arguments: Any, result: Any) -> None:
        given: Any = arguments[0] if arguments else None
        if not self._since:
            if getattr(result, "shape", None) == self._shape:
                self._made.add(result.data_ptr())
        elif getattr(given, "shape", ()) and sys.modules["torch"].is_grad_enabled():
            kind = next((self._kinds[one] for one in type(module).__mro__ if one in self._kinds), "")
            words = [(name, _plain(getattr(module, name))) for name in _KINDS.get(kind, ())]
            if kind.startswith(("Conv", "Linear")):
                words.append(("bias", module.bias is not None))
            if kind and given.is_floating_point():
                self._layers[kind, tuple(words), tuple(given.shape), bool(given.requires_grad)] += 1
        if self._depth == self._since:
            self._since = 0
        self._depth -= 1


def _guarded(hook: Callable[..., None]) -> Callable[..., None]:
    """Returns a hook whose failure is recorded, and is none of the script's step."""

    def call(*arguments: Any) -> None:
        try:
            hook(*arguments)
        except Exception:  # noqa: BLE001  # whatever a script gives to its modules
            note_fault("layers")

    return call


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value
