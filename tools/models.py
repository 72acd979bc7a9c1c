"""The small networks that `train.py` trains, each in a screen, and what is put around any network to train in parallel.

`SmallResNet`, `SmallDeepLab` and `SmallTransformer`; `LossInForward`, `InPrecision` and `sync_batch_norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al., 2016), with gaps between their taps if dilated."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, dilation, dilation, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, outputs, H / stride, W / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """Four stages of one block each: (B, C, H, W) to (B, outputs)."""

    def __init__(self, channels: int, outputs: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(*(Block(widths[i], widths[i + 1], 1 if i == 0 else 2) for i in range(4)))
        self.head = nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, outputs)."""
        return self.head(self.stages(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


def convolution(inputs: int, outputs: int, size: int, *, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """A convolution, batch-normalized, and what is above zero of it."""
    padding = dilation * (size // 2)
    conv = nn.Conv2d(inputs, outputs, size, stride, padding, dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class Pyramid(nn.Module):
    """Atrous spatial pyramid pooling (Chen et al., 2017): features seen at several distances, and as a whole."""

    def __init__(self, inputs: int, outputs: int, rates: tuple[int, ...] = (2, 4, 8)) -> None:
        super().__init__()
        near = [convolution(inputs, outputs, 1)]
        self.branches = nn.ModuleList(near + [convolution(inputs, outputs, 3, dilation=rate) for rate in rates])
        # No batch norm here: over one pixel an image it would see as few values as there are images.
        self.whole = nn.Sequential(nn.Conv2d(inputs, outputs, 1), nn.ReLU())
        self.join = convolution((len(rates) + 2) * outputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, outputs, H, W)."""
        whole = self.whole(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        return self.join(torch.cat([*(branch(x) for branch in self.branches), whole], dim=1))  # type: ignore[no-any-return]


class SmallDeepLab(nn.Module):
    """A DeepLabv3+ (Chen et al., 2018) in small: (B, C, H, W) to (B, outputs, H, W).

    An encoder goes down to an eighth of the size and on with dilated convolutions, a pyramid looks around, and a
    decoder joins that with the sharper features of a quarter of the size.
    """

    def __init__(self, channels: int, outputs: int, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.quarter = nn.Sequential(convolution(channels, width, 3, stride=2), Block(width, 2 * width, 2))
        self.eighth = nn.Sequential(
            Block(2 * width, 4 * width, 2),
            Block(4 * width, 4 * width, dilation=2),
            Block(4 * width, 4 * width, dilation=4),
        )
        self.pyramid = nn.Sequential(Pyramid(4 * width, 2 * width), nn.Dropout2d(dropout))
        self.sharp = convolution(2 * width, width, 1)
        self.join = convolution(3 * width, 2 * width, 3)
        self.head = nn.Conv2d(2 * width, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, outputs, H, W)."""
        quarter = self.quarter(x)
        far = F.interpolate(self.pyramid(self.eighth(quarter)), size=quarter.shape[2:], mode="bilinear")
        logits = self.head(self.join(torch.cat([self.sharp(quarter), far], dim=1)))
        return F.interpolate(logits, size=x.shape[2:], mode="bilinear")


class Attention(nn.Module):
    """Every token sees its neighbours, looks at all others, then thinks by itself.

    A transformer's layer (Vaswani et al., 2017; normalized first) behind a convolution, which tells where tokens stand
    to one another: from few texts that is learnt sooner than from numbers of places.
    """

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.near = nn.Conv1d(width, width, 5, padding=2)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Tokens (B, L, width); those where the mask (B, L) is False are not looked at."""
        x = x * mask[:, :, None]
        x = x + F.gelu(self.near(x.transpose(1, 2)).transpose(1, 2))
        parts = self.queries_keys_values(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, attn_mask=mask[:, None, None, :])
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.norm2(x))  # type: ignore[no-any-return]


class SmallTransformer(nn.Module):
    """Token ids, their mask and, of pairs, the sentence each is of, (B, L) each, to (B, outputs).

    Without layers: a bag of words.

    In training each layer is left out of a step with probability `layer_drop` (Fan et al., 2020), on each rank by its
    own draws; its parameters then have no gradient on that rank.
    """

    def __init__(
        self,
        words: int,
        outputs: int,
        width: int,
        layers: int,
        types: int = 0,
        *,
        dropout: float = 0.1,
        layer_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.types = nn.Embedding(types, width) if types else None
        self.layer_drop = layer_drop
        self.words = nn.Sequential(nn.Embedding(words, width), nn.Dropout(dropout))
        self.layers = nn.ModuleList(Attention(width) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs))

    def forward(self, tokens: Tensor, mask: Tensor, types: Tensor | None = None) -> Tensor:
        """Logits (B, outputs), of the mean over the tokens that the mask keeps."""
        # A row without any token looks at its padding, rather than divide by nothing.
        mask = mask | ~mask.any(1, keepdim=True)
        x = self.words(tokens)
        if self.types is not None:
            x = x + self.types(types)
        for layer in self.layers:
            if not (self.training and self.layer_drop) or float(torch.rand(())) >= self.layer_drop:
                x = layer(x, mask)
        kept = mask[:, :, None].to(x.dtype)
        return self.head((x * kept).sum(1) / kept.sum(1))  # type: ignore[no-any-return]


class LossInForward(nn.Module):
    """A network and its loss as one module, so that what leaves a replica is a number and not its answers.

    `nn.DataParallel(network)` gathers every answer on one device, which then also holds their gradients and computes
    the loss alone; `nn.DataParallel(LossInForward(network, losses))` leaves all of that where the answers are.

    Args:
        network: whatever `losses` calls.
        losses: from the network and a batch to the loss of each sample, (B,).
    """

    def __init__(self, network: nn.Module, losses: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> None:
        super().__init__()
        self.network, self.losses = network, losses

    def forward(self, batch: dict[str, Tensor], valid: Tensor) -> Tensor:
        """Sum of the losses of the rows that are valid, bool (B,), as (1,): gathered, one number a replica."""
        losses = self.losses(self.network, batch)
        return (losses * valid.to(losses.device)).sum().view(1)


class InPrecision(nn.Module):
    """A network whose forward runs under autocast; float32 where `dtype` is None.

    Autocast is entered inside, since the threads of `nn.DataParallel` do not take over its dtype.
    """

    def __init__(self, network: nn.Module, device_type: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.network, self.device_type, self.dtype = network, device_type, dtype

    def forward(self, *inputs: Tensor) -> Tensor:
        """What the network answers; in the lower precision where its last layer is a matrix product."""
        with torch.autocast(self.device_type, self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            return self.network(*inputs)  # type: ignore[no-any-return]


def data_parallel(module: nn.Module, device: torch.device, output_device: int | None = None) -> nn.Module:
    """`nn.DataParallel` over all GPUs for a module that is on one; on the CPU the module itself.

    Without being asked `nn.DataParallel` takes the GPUs of a machine for a module on its CPU, too.
    """
    return nn.DataParallel(module, output_device=output_device) if device.type == "cuda" else module


def sync_batch_norm(network: nn.Module, device: torch.device) -> nn.Module:
    """The network with its batch norms taking their moments over the batches of all ranks."""
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-any-return]
    for parent in list(network.modules()):
        for name, norm in parent.named_children():
            if isinstance(norm, nn.modules.batchnorm._BatchNorm):
                if not (type(norm) is nn.BatchNorm2d and norm.affine and norm.track_running_stats and norm.momentum):
                    raise ValueError(f"{norm}: on the CPU only a plain BatchNorm2d is synchronized")
                synced = CpuSyncBatchNorm(norm.num_features, norm.eps, norm.momentum)
                synced.load_state_dict(norm.state_dict())
                setattr(parent, name, synced)
    return network


class CpuSyncBatchNorm(nn.BatchNorm2d):
    """What `nn.SyncBatchNorm` is on GPUs, which refuses tensors on the CPU; plain, not fast."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalized features (B, C, H, W), by the moments of all ranks while training."""
        if not (self.training and dist.is_initialized()):
            return super().forward(input)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        size = x.new_tensor([x.numel() / x.shape[1]])
        *sums, count = _SumOverRanks.apply(torch.cat([x.sum((0, 2, 3)), size])).split([x.shape[1], 1])
        if count < 2:
            raise ValueError("a batch norm needs more than one value per channel, over all ranks")
        mean = sums[0] / count
        centred = x - mean[:, None, None]
        # Around the mean of all ranks: the difference of two large sums would lose what float32 can hold.
        variance = _SumOverRanks.apply(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(input.dtype)


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks, on each; what each rank's loss says of it is summed likewise."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient
