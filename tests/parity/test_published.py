"""Networks in the code patterns of published repositories spike as before conversion, in float64.

Small versions, written after the papers: layers, order and time are those of the published code,
whose `forward` reshapes `[T, B, ...]` itself.

Sources: Fang et al., "Deep Residual Learning in Spiking Neural Networks", NeurIPS 2021
(SEW-ResNet); Zhou et al., "Spikformer: When Spiking Neural Network Meets Transformer", ICLR 2023;
Yao et al., "Spike-driven Transformer", NeurIPS 2023; Zhou et al., "QKFormer: Hierarchical Spiking
Transformer using Q-K Attention", NeurIPS 2024.
"""

from __future__ import annotations

import copy
import io
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.transforms.converters import over_time

REASON = "SpikingJelly is not installed: see CONTRIBUTING.md"
neuron = pytest.importorskip("spikingjelly.activation_based.neuron", reason=REASON)
layer = pytest.importorskip("spikingjelly.activation_based.layer", reason=REASON)
functional = pytest.importorskip("spikingjelly.activation_based.functional", reason=REASON)
surrogate = pytest.importorskip("spikingjelly.activation_based.surrogate", reason=REASON)
models = {
    name: pytest.importorskip(f"spikingjelly.activation_based.model.{name}", reason=REASON)
    for name in ("spikformer", "qkformer", "spike_driven_transformer")
}

T, B = 3, 2


def lif(threshold: float = 0.5) -> nn.Module:
    """Thresholds are lower than published: fresh weights drive neurons less."""
    return neuron.LIFNode(
        tau=2.0, detach_reset=True, v_threshold=threshold, surrogate_function=surrogate.ATan(),
        step_mode="m",
    )  # fmt: skip


def if_node() -> nn.Module:
    return neuron.IFNode(
        v_threshold=0.5, detach_reset=True, surrogate_function=surrogate.ATan(), step_mode="m"
    )


# SEW-ResNet: stateless layers in containers, a static first layer, the mean over time last.


class SEWBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int, cnf: str) -> None:
        super().__init__()
        self.conv1 = layer.SeqToANNContainer(
            nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        )
        self.sn1 = if_node()
        self.conv2 = layer.SeqToANNContainer(
            nn.Conv2d(planes, planes, 3, 1, 1, bias=False), nn.BatchNorm2d(planes)
        )
        self.sn2 = if_node()
        self.downsample = None
        if stride > 1 or inplanes != planes:
            self.downsample = nn.Sequential(
                layer.SeqToANNContainer(
                    nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
                ),
                if_node(),
            )
        self.cnf = cnf

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.sn2(self.conv2(self.sn1(self.conv1(x))))
        if self.cnf == "ADD":
            return out + identity
        if self.cnf == "AND":
            return out * identity
        return identity * (1.0 - out)


class SEWResNet(nn.Module):
    def __init__(self, cnf: str) -> None:
        super().__init__()
        self.T = T
        self.conv1 = nn.Conv2d(2, 4, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.sn1 = if_node()
        self.maxpool = layer.SeqToANNContainer(nn.MaxPool2d(3, 2, 1))
        self.layer1 = nn.Sequential(SEWBlock(4, 4, 1, cnf), SEWBlock(4, 4, 1, cnf))
        self.layer2 = nn.Sequential(SEWBlock(4, 8, 2, cnf))
        self.avgpool = layer.SeqToANNContainer(nn.AdaptiveAvgPool2d((1, 1)))
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x))
        x = x.unsqueeze(0).repeat(self.T, 1, 1, 1, 1)
        x = self.maxpool(self.sn1(x))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 2).mean(dim=0))


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
    def __init__(self, attention: nn.Module, dim: int) -> None:
        super().__init__()
        self.attn = attention
        self.mlp = nn.Sequential(Projection(dim, 2 * dim), Projection(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        t, b, c, h, w = x.shape
        x = x.flatten(3)
        x = x + self.attn(x)
        x = x + self.mlp(x)
        return x.reshape(t, b, c, h, w)


class Patches(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.proj_conv = nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False)
        self.proj_bn, self.proj_lif = nn.BatchNorm2d(outputs), lif()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.rpe_conv = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.rpe_bn, self.rpe_lif = nn.BatchNorm2d(outputs), lif()

    def forward(self, x: Tensor) -> Tensor:
        t, b, _, h, w = x.shape
        x = self.proj_bn(self.proj_conv(x.flatten(0, 1))).reshape(t, b, -1, h, w)
        x = self.maxpool(self.proj_lif(x).flatten(0, 1))
        y = self.rpe_bn(self.rpe_conv(x)).reshape(t, b, -1, h // 2, w // 2).contiguous()
        return x.reshape(t, b, -1, h // 2, w // 2) + self.rpe_lif(y)


class Spikformer(nn.Module):
    def __init__(self, stages: list[nn.Module]) -> None:
        super().__init__()
        self.T = T
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(16, 10)

    def forward_features(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.flatten(3).mean(3)

    def forward(self, x: Tensor) -> Tensor:
        x = (x.unsqueeze(0)).repeat(self.T, 1, 1, 1, 1)
        return self.head(self.forward_features(x).mean(0))


def spikformer() -> nn.Module:
    return Spikformer([Patches(2, 16), *(Block(SpikingAttention(16, 2), 16) for _ in range(2))])


def qkformer() -> nn.Module:
    return Spikformer(
        [Patches(2, 8), Block(TokenAttention(8, 2), 8), Patches(8, 16),
         Block(SpikingAttention(16, 2), 16)]
    )  # fmt: skip


# Spike-driven Transformer: shortcuts of membrane inputs, several outputs, a dict of activations.


class DrivenAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.shortcut_lif = heads, lif()
        self.q_conv, self.k_conv, self.v_conv = (nn.Conv2d(dim, dim, 1, bias=False) for _ in "qkv")
        self.q_bn, self.k_bn, self.v_bn = (nn.BatchNorm2d(dim) for _ in "qkv")
        self.q_lif, self.k_lif, self.v_lif = lif(), lif(), lif()
        self.talking_heads_lif = lif(0.25)
        self.proj_conv, self.proj_bn = nn.Conv2d(dim, dim, 1), nn.BatchNorm2d(dim)

    def forward(self, x: Tensor, hook: dict | None = None):
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
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1_lif, self.fc2_lif = lif(), lif()
        self.fc1_conv, self.fc1_bn = nn.Conv2d(dim, 2 * dim, 1), nn.BatchNorm2d(2 * dim)
        self.fc2_conv, self.fc2_bn = nn.Conv2d(2 * dim, dim, 1), nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        t, b, c, h, w = x.shape
        y = self.fc1_bn(self.fc1_conv(self.fc1_lif(x).flatten(0, 1))).reshape(t, b, -1, h, w)
        y = self.fc2_bn(self.fc2_conv(self.fc2_lif(y).flatten(0, 1))).reshape(t, b, c, h, w)
        return x + y


class SpikeDrivenTransformer(nn.Module):
    def __init__(self, tet: bool) -> None:
        super().__init__()
        self.T, self.TET = T, tet
        self.patch_embed = Patches(2, 16)
        self.attn, self.mlp = DrivenAttention(16, 2), DrivenMLP(16)
        self.head_lif, self.head = lif(), nn.Linear(16, 10)

    def forward(self, x: Tensor, hook: dict | None = None):
        if len(x.shape) < 5:
            x = (x.unsqueeze(0)).repeat(self.T, 1, 1, 1, 1)
        else:
            x = x.transpose(0, 1).contiguous()
        x = self.patch_embed(x)
        x, _, hook = self.attn(x, hook=hook)
        x = self.mlp(x).flatten(3).mean(3)
        x = self.head(self.head_lif(x))
        return (x if self.TET else x.mean(0)), hook


def of_spikingjelly(name: str) -> nn.Module:
    """The version that SpikingJelly 2.0.0 ships."""
    module = models[name]
    if name == "spikformer":
        return module.Spikformer(
            T=T, img_size_h=16, img_size_w=16, patch_size=4, in_channels=2, num_classes=10,
            embed_dims=16, num_heads=2, depths=1, spiking_neuron=of_node,
        )  # fmt: skip
    kind = module.QKFormer if name == "qkformer" else module.SpikeDrivenTransformer
    sizes = {"embed_dims": 16, "num_heads": 2, "depths": 1}
    if name == "qkformer":
        sizes = {"embed_dims": 16, "num_heads": (2, 2, 2), "depths": (1, 1, 1)}
    return kind(T=T, in_channels=2, num_classes=10, spiking_neuron=of_node, **sizes)


def of_node(v_threshold: float = 0.5, **options) -> nn.Module:
    options |= {"tau": 2.0, "detach_reset": True, "step_mode": "m"}
    return neuron.LIFNode(v_threshold=v_threshold / 2, **options)


NETWORKS = {
    "sew_resnet add": lambda: SEWResNet("ADD"),
    "sew_resnet iand": lambda: SEWResNet("IAND"),
    "spikformer": spikformer,
    "qkformer": qkformer,
    "spike_driven_transformer": lambda: SpikeDrivenTransformer(tet=False),
    "spike_driven_transformer tet": lambda: SpikeDrivenTransformer(tet=True),
    **{f"{n} of spikingjelly": (lambda n=n: of_spikingjelly(n)) for n in models},
}


def spikes_of(net: nn.Module, kind: type) -> dict[str, Tensor]:
    """What the neurons of the next call put out, by name."""
    found: dict[str, Tensor] = {}
    for name, module in net.named_modules():
        if isinstance(module, kind):
            module.register_forward_hook(lambda m, args, y, name=name: found.update({name: y}))
        if isinstance(module, sf.Neuron):  # float64 runs in the eager loop
            module.register_forward_pre_hook(
                lambda m, args, kwargs: (args, {**kwargs, "impl": "reference"}), with_kwargs=True
            )
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_equal_spikes_and_gradients(name):
    """In training, with batch statistics; all weights are shared."""
    torch.manual_seed(0)
    net = NETWORKS[name]().double()
    size = 32 if "of spikingjelly" in name and "spikformer" not in name else 16
    x = 2 * torch.rand(B, 2, size, size, dtype=torch.float64)
    ours = sf.convert(net)
    assert list(ours.state_dict()) == list(net.state_dict())
    wanted_spikes, spikes = spikes_of(net, neuron.BaseNode), spikes_of(ours, sf.Neuron)
    expected, found = net(x), ours(x)
    if isinstance(expected, tuple):
        expected, found = expected[0], found[0]
    assert [*spikes] == [*wanted_spikes]
    rates = [y.mean().item() for y in wanted_spikes.values()]
    assert sum(0.02 < rate < 0.98 for rate in rates) > 0.7 * len(rates), rates
    for key, y in wanted_spikes.items():
        assert torch.equal(spikes[key], y), key
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    parameters = [*net.parameters()]
    wanted = torch.autograd.grad((expected * weights).sum(), parameters, allow_unused=True)
    gradients = torch.autograd.grad((found * weights).sum(), parameters, allow_unused=True)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


class Layers(nn.Module):
    """SpikingJelly's layers for sequences, in code that counts dims of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = layer.Conv2d(2, 4, 3, padding=1)
        self.norm = layer.TemporalEffectiveBatchNorm2d(T, 4)
        self.lif1, self.pool, self.drop = lif(), layer.MaxPool2d(2), layer.Dropout(0.3)
        self.conv2, self.norm2, self.lif2 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), lif()
        self.steps = layer.MultiStepContainer(nn.Flatten(), nn.Linear(144, 20), neuron.IFNode(0.1))
        self.fc, self.lif3, self.vote = layer.Linear(20, 20), lif(0.2), layer.VotingLayer(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.pool(self.lif1(self.norm(self.conv(x)))))
        x = functional.seq_to_ann_forward(x, [self.conv2, self.norm2])
        if self.conv.step_mode == "s":
            raise AssertionError("code for single steps")
        x = self.steps(self.lif2(x))
        return self.vote(self.lif3(self.fc(x))).mean(0)


def test_layers_over_time(monkeypatch):
    torch.manual_seed(0)
    # A container of steps runs its layers by Temporal, here in float64.
    monkeypatch.setattr(
        over_time, "Temporal", lambda net: partial(sf.Temporal(net), impl="reference")
    )
    net = Layers()
    for module in (net.conv, net.norm, net.pool, net.drop, net.fc, net.vote):
        module.step_mode = "m"
    net.double().norm.scale.data.uniform_(0.5, 2.0)
    x = 2 * torch.rand(T, B, 2, 16, 16, dtype=torch.float64)
    ours = sf.convert(net)
    assert list(ours.state_dict()) == list(net.state_dict())
    wanted, found = spikes_of(net, neuron.BaseNode), spikes_of(ours, sf.Neuron)
    torch.manual_seed(1)
    expected = net(x)
    torch.manual_seed(1)
    assert torch.equal(ours(x), expected)
    assert expected.std() > 0.1
    for name in ("lif1", "lif2", "lif3"):
        assert torch.equal(found[name], wanted[name])
    with pytest.raises(ValueError, match="T is 2: expected 3"):
        ours(x[:2])


def test_a_network_over_time_says_how_it_is_called():
    ours = sf.convert(spikformer())
    table = str(ours.conversion)
    assert "call it as the original, without Temporal: Spikformer.forward, line" in table
    assert "repeat(self.T, 1, 1, 1, 1)` counts dims of [T, B, ...]" in table
    with pytest.raises(ValueError, match="the code of Spikformer is written for"):
        sf.Temporal(ours)(torch.rand(T, B, 2, 16, 16))


def test_a_network_over_time_is_compiled_copied_and_saved():
    torch.manual_seed(0)
    net = SEWResNet("ADD")
    ours, x = sf.convert(net), 2 * torch.rand(B, 2, 16, 16)
    expected = ours(x)
    functional.reset_net(net)
    torch.testing.assert_close(expected, net(x), rtol=1e-3, atol=1e-3)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), expected)
