"""Networks for SpikingJelly in the code patterns of their published repositories.

Written after the papers: layers, order and time are those of the published code, whose `forward`
reshapes `[T, B, ...]` itself. By default they are small, for tests; `benchmarks.convert` makes them
at published sizes.

Sources: Fang et al., "Deep Residual Learning in Spiking Neural Networks", NeurIPS 2021
(SEW-ResNet); Zhou et al., "Spikformer: When Spiking Neural Network Meets Transformer", ICLR 2023;
Yao et al., "Spike-driven Transformer", NeurIPS 2023; Zhou et al., "QKFormer: Hierarchical Spiking
Transformer using Q-K Attention", NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import spikefuse as sf
from benchmarks.jelly import spikingjelly


def lif(threshold: float = 0.5) -> nn.Module:
    """Thresholds are lower than published: fresh weights drive neurons less."""
    return _node("LIFNode", v_threshold=threshold, tau=2.0)


def if_node() -> nn.Module:
    return _node("IFNode", v_threshold=0.5)


def _node(kind: str, **options: Any) -> nn.Module:
    neuron, surrogate = spikingjelly("neuron", "surrogate")
    options |= {"detach_reset": True, "surrogate_function": surrogate.ATan(), "step_mode": "m"}
    return getattr(neuron, kind)(**options)


def stateless(*layers: nn.Module) -> nn.Module:
    (layer,) = spikingjelly("layer")
    return layer.SeqToANNContainer(*layers)


def spikes_of(net: nn.Module, kind: type) -> dict[str, Tensor]:
    """Return what the neurons of the next call put out, by name; the call fills it."""
    found: dict[str, Tensor] = {}
    for name, module in net.named_modules():
        if isinstance(module, kind):
            module.register_forward_hook(lambda m, args, y, name=name: found.update({name: y}))
        if isinstance(module, sf.Neuron):  # float64 runs in the eager loop
            module.register_forward_pre_hook(
                lambda m, args, kwargs: (args, {**kwargs, "impl": "reference"}), with_kwargs=True
            )
    return found


# SEW-ResNet: stateless layers in containers, a static first layer, the mean over time last.


class SEWBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int, cnf: str) -> None:
        super().__init__()

        def conv(inputs: int, size: int, stride: int) -> nn.Module:
            made = nn.Conv2d(inputs, planes, size, stride, size // 2, bias=False)
            return stateless(made, nn.BatchNorm2d(planes))

        self.conv1, self.sn1 = conv(inplanes, 3, stride), if_node()
        self.conv2, self.sn2 = conv(planes, 3, 1), if_node()
        self.downsample, self.cnf = None, cnf
        if stride > 1 or inplanes != planes:
            self.downsample = nn.Sequential(conv(inplanes, 1, stride), if_node())

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.sn2(self.conv2(self.sn1(self.conv1(x))))
        if self.cnf == "ADD":
            return out + identity
        return identity * (1.0 - out)


class SEWResNet(nn.Module):
    """`stem` is the kernel size and stride of the first convolution.

    On CPUs, PyTorch 2.13 writes beyond the end of memory in the backward pass of a channels-last
    1x1 convolution with a stride and fewer than 8 input channels.
    """

    def __init__(
        self,
        T: int = 3,
        cnf: str = "ADD",
        channels: int = 2,
        classes: int = 10,
        stem: tuple[int, int] = (3, 1),
        widths: Sequence[int] = (8, 16),
        blocks: Sequence[int] = (2, 1),
    ) -> None:
        super().__init__()
        self.T = T
        size, stride = stem
        self.conv1 = nn.Conv2d(channels, widths[0], size, stride, size // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.sn1 = if_node()
        self.maxpool = stateless(nn.MaxPool2d(3, 2, 1))
        found, width = [], widths[0]
        for planes, count in zip(widths, blocks, strict=True):
            for i in range(count):
                found.append(SEWBlock(width, planes, 2 if i == 0 and found else 1, cnf))
                width = planes
        self.layers = nn.Sequential(*found)
        self.avgpool = stateless(nn.AdaptiveAvgPool2d((1, 1)))
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        x = x.unsqueeze(0).repeat(self.T, 1, 1, 1, 1)
        x = self.maxpool(self.sn1(x))
        x = self.avgpool(self.layers(x))
        return self.fc(torch.flatten(x, 2).mean(dim=0))


def sew_sequential(T: int = 3, **options: Any) -> nn.Module:
    """Return the same layers for `[T, B, ...]` in containers only, as in SEW-ResNets for events."""
    net = SEWResNet(T, **options)
    head = stateless(nn.Flatten(), net.fc)
    stem = stateless(net.conv1, net.bn1)
    return nn.Sequential(stem, net.sn1, net.maxpool, net.layers, net.avgpool, head)


# Spikformer: each module folds and unfolds time, and attention is a product of torch.


class Projection(nn.Module):
    """A pointwise convolution of tokens, a norm and a neuron."""

    def __init__(self, inputs: int, outputs: int, threshold: float = 0.5) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, 1, bias=False)
        self.bn = nn.BatchNorm1d(outputs)
        self.lif = lif(threshold)

    def forward(self, x: Tensor) -> Tensor:
        t, b, _, n = x.shape
        y = self.bn(self.conv(x.flatten(0, 1)))
        return self.lif(y.reshape(t, b, -1, n).contiguous())


class SpikingAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, 0.125
        self.q, self.k, self.v = (Projection(dim, dim) for _ in range(3))
        self.attn_lif, self.proj = lif(0.25), Projection(dim, dim)

    def heads(self, x: Tensor) -> Tensor:
        t, b, c, n = x.shape
        x = x.transpose(-1, -2).reshape(t, b, n, self.num_heads, c // self.num_heads)
        return x.permute(0, 1, 3, 2, 4).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        t, b, c, n = x.shape
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        x = (q @ k.transpose(-2, -1)) * self.scale @ v
        x = self.attn_lif(x.transpose(3, 4).reshape(t, b, c, n).contiguous())
        return self.proj(x)


class TokenAttention(nn.Module):
    """QKFormer's: a neuron on the sum of q over the channels of a head chooses tokens of k."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.k = Projection(dim, dim), Projection(dim, dim)
        self.attn_lif, self.proj = lif(), Projection(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        t, b, c, n = x.shape
        q = self.q(x).reshape(t, b, self.num_heads, c // self.num_heads, n)
        k = self.k(x).reshape(t, b, self.num_heads, c // self.num_heads, n)
        attn = self.attn_lif(torch.sum(q, dim=3, keepdim=True))
        return self.proj(torch.mul(attn, k).flatten(2, 3))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, dim: int, ratio: int = 4) -> None:
        super().__init__()
        self.attn = attention
        self.mlp = nn.Sequential(Projection(dim, ratio * dim), Projection(ratio * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        t, b, c, h, w = x.shape
        x = x.flatten(3)
        x = x + self.attn(x)
        return (x + self.mlp(x)).reshape(t, b, c, h, w)


class Patch(nn.Module):
    """A convolution of images, a norm and a neuron, with or without a pooling behind."""

    def __init__(
        self, inputs: int, outputs: int, pool: bool = False, size: int = 3, stride: int = 1
    ) -> None:
        super().__init__()
        self.proj_conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
        self.proj_bn, self.proj_lif = nn.BatchNorm2d(outputs), lif()
        self.maxpool = nn.MaxPool2d(3, 2, 1) if pool else None

    def forward(self, x: Tensor) -> Tensor:
        t, b = x.shape[:2]
        x = self.proj_bn(self.proj_conv(x.flatten(0, 1)))
        x = self.proj_lif(x.reshape(t, b, *x.shape[1:]).contiguous())
        if self.maxpool is not None:
            x = self.maxpool(x.flatten(0, 1))
            x = x.reshape(t, b, *x.shape[1:]).contiguous()
        return x


class Patches(nn.Module):
    """Patches, of which the last `pools` are pooled, and a position embedding."""

    def __init__(self, inputs: int, widths: Sequence[int], pools: int) -> None:
        super().__init__()
        sizes, first = [inputs, *widths], len(widths) - pools
        self.patches = nn.Sequential(
            *(Patch(sizes[i], sizes[i + 1], i >= first) for i in range(len(widths)))
        )
        self.rpe_conv = nn.Conv2d(widths[-1], widths[-1], 3, 1, 1, bias=False)
        self.rpe_bn, self.rpe_lif = nn.BatchNorm2d(widths[-1]), lif()

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        t, b, c, h, w = x.shape
        y = self.rpe_bn(self.rpe_conv(x.flatten(0, 1))).reshape(t, b, c, h, w).contiguous()
        return x + self.rpe_lif(y)


class Downsampling(nn.Module):
    """QKFormer's: convolutions of which the second is pooled before its neuron, and a shortcut."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.first = Patch(inputs, hidden)
        self.proj_conv = nn.Conv2d(hidden, outputs, 3, 1, 1, bias=False)
        self.proj_bn, self.maxpool = nn.BatchNorm2d(outputs), nn.MaxPool2d(3, 2, 1)
        self.proj_lif, self.shortcut = lif(), Patch(hidden, outputs, size=1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        t, b, _, h, w = x.shape
        x = self.first(x)
        y = self.maxpool(self.proj_bn(self.proj_conv(x.flatten(0, 1))))
        y = self.proj_lif(y.reshape(t, b, -1, h // 2, w // 2).contiguous())
        return y + self.shortcut(x)


class Spikformer(nn.Module):
    def __init__(self, T: int, stages: Sequence[nn.Module], dim: int, classes: int) -> None:
        super().__init__()
        self.T = T
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(dim, classes)

    def forward_features(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.flatten(3).mean(3)

    def forward(self, x: Tensor) -> Tensor:
        x = (x.unsqueeze(0)).repeat(self.T, 1, 1, 1, 1)
        return self.head(self.forward_features(x).mean(0))


def spikformer(
    T: int = 3,
    channels: int = 2,
    classes: int = 10,
    widths: Sequence[int] = (8, 16),
    pools: int = 1,
    heads: int = 2,
    depth: int = 2,
) -> nn.Module:
    dim = widths[-1]
    blocks = (Block(SpikingAttention(dim, heads), dim) for _ in range(depth))
    return Spikformer(T, [Patches(channels, widths, pools), *blocks], dim, classes)


def qkformer(
    T: int = 3,
    channels: int = 2,
    classes: int = 10,
    widths: Sequence[int] = (8, 16),
    heads: int = 2,
    depth: int = 1,
) -> nn.Module:
    """Stages of token attention, and a last one of `depth` blocks of spiking attention."""
    stages: list[nn.Module] = []
    *earlier, dim = widths
    for width in earlier:
        hidden = width if stages else width // 2
        stages.append(Downsampling(channels, hidden, width))
        stages.append(Block(TokenAttention(width, heads), width))
        channels = width
    stages.append(Downsampling(channels, dim, dim))
    stages += [Block(SpikingAttention(dim, heads), dim) for _ in range(depth)]
    return Spikformer(T, stages, dim, classes)


# Spike-driven Transformer: shortcuts of membrane inputs, several outputs, a dict of activations.


class DrivenAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.shortcut_lif = heads, lif()
        self.q_conv, self.k_conv, self.v_conv = (nn.Conv2d(dim, dim, 1, bias=False) for _ in "qkv")
        self.q_bn, self.k_bn, self.v_bn = (nn.BatchNorm2d(dim) for _ in "qkv")
        self.q_lif, self.k_lif, self.v_lif = (lif() for _ in "qkv")
        self.talking_heads_lif = lif(0.25)
        self.proj_conv, self.proj_bn = nn.Conv2d(dim, dim, 1), nn.BatchNorm2d(dim)

    def forward(self, x: Tensor, hook: dict[str, Tensor] | None = None) -> Any:
        t, b, c, h, w = x.shape
        identity, n = x, h * w
        x = self.shortcut_lif(x)
        if hook is not None:
            hook["first"] = x.detach()
        folded, found = x.flatten(0, 1), []
        for conv, bn, spike in (
            (self.q_conv, self.q_bn, self.q_lif),
            (self.k_conv, self.k_bn, self.k_lif),
            (self.v_conv, self.v_bn, self.v_lif),
        ):
            y = spike(bn(conv(folded)).reshape(t, b, c, h, w).contiguous())
            y = y.flatten(3).transpose(-1, -2).reshape(t, b, n, self.num_heads, -1)
            found.append(y.permute(0, 1, 3, 2, 4).contiguous())
        q, k, v = found
        kv = self.talking_heads_lif(k.mul(v).sum(dim=-2, keepdim=True))
        x = q.mul(kv).transpose(3, 4).reshape(t, b, c, h, w).contiguous()
        x = self.proj_bn(self.proj_conv(x.flatten(0, 1))).reshape(t, b, c, h, w)
        return x + identity, v, hook


class DrivenMLP(nn.Module):
    def __init__(self, dim: int, ratio: int = 4) -> None:
        super().__init__()
        self.fc1_lif, self.fc2_lif = lif(), lif()
        self.fc1_conv, self.fc1_bn = nn.Conv2d(dim, ratio * dim, 1), nn.BatchNorm2d(ratio * dim)
        self.fc2_conv, self.fc2_bn = nn.Conv2d(ratio * dim, dim, 1), nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        t, b, c, h, w = x.shape
        y = self.fc1_bn(self.fc1_conv(self.fc1_lif(x).flatten(0, 1))).reshape(t, b, -1, h, w)
        y = self.fc2_bn(self.fc2_conv(self.fc2_lif(y).flatten(0, 1))).reshape(t, b, c, h, w)
        return x + y


class DrivenBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attn, self.mlp = DrivenAttention(dim, heads), DrivenMLP(dim)

    def forward(self, x: Tensor, hook: dict[str, Tensor] | None = None) -> Any:
        x, attn, hook = self.attn(x, hook=hook)
        return self.mlp(x), attn, hook


class SpikeDrivenTransformer(nn.Module):
    def __init__(
        self,
        T: int = 3,
        tet: bool = False,
        channels: int = 2,
        classes: int = 10,
        widths: Sequence[int] = (8, 16),
        pools: int = 1,
        heads: int = 2,
        depth: int = 1,
    ) -> None:
        super().__init__()
        self.T, self.TET = T, tet
        dim = widths[-1]
        self.patch_embed = Patches(channels, widths, pools)
        self.block = nn.ModuleList([DrivenBlock(dim, heads) for _ in range(depth)])
        self.head_lif, self.head = lif(), nn.Linear(dim, classes)

    def forward(self, x: Tensor, hook: dict[str, Tensor] | None = None) -> Any:
        if len(x.shape) < 5:
            x = (x.unsqueeze(0)).repeat(self.T, 1, 1, 1, 1)
        else:
            x = x.transpose(0, 1).contiguous()
        x = self.patch_embed(x)
        for block in self.block:
            x, _, hook = block(x, hook=hook)
        x = x.flatten(3).mean(3)
        x = self.head(self.head_lif(x))
        return (x if self.TET else x.mean(0)), hook
