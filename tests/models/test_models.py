"""Every architecture: parameters, operations, sizes, neurons, spikes, gradients and fusing."""

from __future__ import annotations

import inspect
import pickle
import pydoc
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import spikefuse as sf
from spikefuse.models import MODELS, conv

IMAGENET, CIFAR, SHD = (3, 1000, (224, 224)), (3, 10, (32, 32)), (1, 20, (1, 700))
CIFAR100, SSC = (3, 100, (32, 32)), (1, 35, (1, 700))
BATCH_NORMS = {  # weights and biases
    "cifar_small": 2 * (128 + 256 + 512 + 1024 + 512),
    "cifar_medium": 2 * (3 * 128 + 2 * 256 + 2 * 512 + 1024 + 512),
    "cifar_large": 2 * (3 * 128 + 3 * 256 + 3 * 512 + 1024 + 512),
    "alexnet": 2 * (64 + 128 + 256 + 256 + 384 + 256 + 256 + 4096 + 4096),
}
LINEAR = 4 * 4 * 512 * 1024 + 1024 * 512 + 512 * 10 + 10

# model | (in_channels, num_classes, size) | neurons | parameters
PUBLISHED = [
    # torchvision's table for the same topologies: 11.69, 21.80 and 25.56 million.
    ("resnet18", IMAGENET, 17, 11_689_512),
    ("resnet34", IMAGENET, 33, 21_797_672),
    ("resnet50", IMAGENET, 49, 25_557_032),
    # Fang et al., NeurIPS 2021: the same layers, with neurons on the projections too.
    ("sew_resnet18", IMAGENET, 17 + 3, 11_689_512),
    ("sew_resnet34", IMAGENET, 33 + 3, 21_797_672),
    ("sew_resnet50", IMAGENET, 49 + 4, 25_557_032),
    # torchvision's numbers with batch norm, without biases before it.
    ("vgg11", IMAGENET, 10, 132_868_840 - 2_752),
    ("vgg16", IMAGENET, 15, 138_365_992 - 4_224),
    # The usual ResNet18 for small images, with two convolutions per block and three projections.
    (
        "ms_resnet18_cifar",
        CIFAR,
        17,
        9 * (3 * 64 + 4 * 64**2 + 64 * 128 + 128 * 256 + 256 * 512)
        + 9 * 3 * (128**2 + 256**2 + 512**2)
        + 64 * 128
        + 128 * 256
        + 256 * 512
        + 2 * 5 * (64 + 128 + 256 + 512)
        + 512 * 10
        + 10,
    ),
    # Liang et al., Table I: ResNet34 with a projection, 64B0, in the first stage as well.
    ("ms_resnet34", IMAGENET, 33, 21_797_672 + 64 * 64 + 2 * 64),
    # The same table, its widths and kernels multiplied out.
    (
        "cifar_small",
        CIFAR,
        5,
        9 * (3 * 128 + 128 * 256 + 256 * 512) + LINEAR + BATCH_NORMS["cifar_small"],
    ),
    (
        "cifar_medium",
        CIFAR,
        9,
        9 * (3 * 128 + 2 * 128**2 + 128 * 256 + 256**2 + 256 * 512 + 512**2)
        + LINEAR
        + BATCH_NORMS["cifar_medium"],
    ),
    (
        "cifar_large",
        CIFAR,
        11,
        9 * (3 * 128 + 2 * 128**2 + 128 * 256 + 2 * 256**2 + 256 * 512 + 2 * 512**2)
        + LINEAR
        + BATCH_NORMS["cifar_large"],
    ),
    (
        "alexnet",
        IMAGENET,
        9,
        9 * (3 * 64 + 64 * 128 + 128 * 256 + 256**2 + 256 * 384 + 384 * 256 + 256**2)
        + 7 * 7 * 256 * 4096
        + 4096**2
        + 4096 * 1000
        + 1000
        + BATCH_NORMS["alexnet"],
    ),
    # Deng et al., ICLR 2022, VGGSNN: 9.27 million, 2,752 of which are biases before batch norm.
    ("vggsnn", (2, 10, (48, 48)), 8, 9_271_498 - 2_752),
    # Zhou et al., ICLR 2023: 9.32 million, 13,824 of which are biases before batch norm.
    ("spikformer", CIFAR, 33, 9_324_730 - 13_824),
    # Finkbeiner and Neftci: 2,944 neurons in all, up to rounding.
    ("event-mlp", SHD, 3, 700 * 980 + 2 * 980**2 + 980 * 20 + 3 * 980 + 20),
    ("event-mlp2", SHD, 2, 700 * 1471 + 1471**2 + 1471 * 20 + 2 * 1471 + 20),
    ("event-mlp4", SHD, 4, 700 * 735 + 3 * 735**2 + 735 * 20 + 4 * 735 + 20),
    ("event-mlp5", SHD, 5, 700 * 588 + 4 * 588**2 + 588 * 20 + 5 * 588 + 20),
    ("mlp2", SHD, 2, 700 * 1471 + 1471**2 + 1471 * 20 + 2 * 1471 + 20),
    ("mlp3", SHD, 3, 700 * 980 + 2 * 980**2 + 980 * 20 + 3 * 980 + 20),
    ("mlp4", SHD, 4, 700 * 735 + 3 * 735**2 + 735 * 20 + 4 * 735 + 20),
    ("mlp5", SHD, 5, 700 * 588 + 4 * 588**2 + 588 * 20 + 5 * 588 + 20),
    # Baronig et al.: 140 inputs, with batch norms where theirs have biases. The readout is an LI.
    ("recurrent", SHD, 2 + 1, 140 * 360 + 3 * 360**2 + 360 * 20 + 4 * 360 + 20),
    ("mlp", (1, 10, (8, 8)), 2, 64 * 256 + 256**2 + 4 * 256 + 256 * 10 + 10),
    ("conv", (1, 10, (28, 28)), 2, 9 * 32 + 9 * 32 * 64 + 2 * 96 + 64 * 7 * 7 * 10 + 10),
]

# model | arguments | published, in millions | parameters counted there and not here
ROUNDED = [
    # Zhou et al., NeurIPS 2024, list SEW-ResNet152; 101 is torchvision's ResNet101, rounded.
    ("sew_resnet101", IMAGENET, "44.55", 0),
    ("sew_resnet152", IMAGENET, "60.19", 0),
    # Yao et al., NeurIPS 2023.
    ("ms_resnet18", IMAGENET, "11.69", 0),
    ("ms_resnet104", IMAGENET, "77.28", 0),
    # Zhou et al., ICLR 2023; the biases of six layers before a norm per block.
    ("spikformer_8_384", IMAGENET, "16.81", 8 * 6 * 384),
    ("spikformer_8_512", IMAGENET, "29.68", 8 * 6 * 512),
    ("spikformer_8_768", IMAGENET, "66.34", 8 * 6 * 768),
    # Zhou et al., NeurIPS 2024; the same biases.
    ("qkformer", CIFAR100, "6.74", 6 * (96 + 192 + 2 * 384)),
    ("qkformer_10_384", IMAGENET, "16.47", 6 * (96 + 2 * 192 + 7 * 384)),
    ("qkformer_10_512", IMAGENET, "29.08", 6 * (128 + 2 * 256 + 7 * 512)),
    ("qkformer_10_768", IMAGENET, "64.96", 6 * (192 + 2 * 384 + 7 * 768)),
    # Yao et al., NeurIPS 2023; the same biases.
    ("sdt", CIFAR100, "10.28", 2 * 6 * 512),
    ("sdt_8_384", IMAGENET, "16.81", 8 * 6 * 384),
    ("sdt_8_512", IMAGENET, "29.68", 8 * 6 * 512),
    ("sdt_8_768", IMAGENET, "66.34", 8 * 6 * 768),
    # Yao et al., ICLR 2024; the biases of downsampling and of two layers per block.
    ("sdt_v2_15m", IMAGENET, "15.1", 32 + 64 + 128 + 256 + 360 + 5 * (6 * 256 + 2 * 360)),
    ("sdt_v2_31m", IMAGENET, "31.3", 48 + 96 + 192 + 384 + 480 + 5 * (6 * 384 + 2 * 480)),
    ("sdt_v2_55m", IMAGENET, "55.4", 64 + 128 + 256 + 512 + 640 + 5 * (6 * 512 + 2 * 640)),
    # Yao et al., TPAMI 2025; the same biases.
    ("sdt_v3_5m", IMAGENET, "5.1", 16 + 32 + 64 + 128 + 192 + 5 * (6 * 128 + 2 * 192)),
    ("sdt_v3_10m", IMAGENET, "10.0", 24 + 48 + 96 + 192 + 240 + 5 * (6 * 192 + 2 * 240)),
    ("sdt_v3_19m", IMAGENET, "19.0", 32 + 64 + 128 + 256 + 360 + 5 * (6 * 256 + 2 * 360)),
    # Fang et al., NeurIPS 2025; the biases of three layers before a norm per block.
    ("maxformer_10_384", IMAGENET, "16.23", 6 * (96 + 2 * 192 + 7 * 384)),
    ("maxformer_10_512", IMAGENET, "28.65", 6 * (128 + 2 * 256 + 7 * 512)),
    ("maxformer_10_768", IMAGENET, "63.99", 6 * (192 + 2 * 384 + 7 * 768)),
    # Baronig et al. (truncated) and Bittar and Garner, who learn parameters of the neurons, too.
    ("recurrent_720", SSC, "1.6", 0),
    ("recurrent_1024", SHD, "3.9", 0),
    # Shi et al., CVPR 2024, whose numbers for all but the last agree without norms.
    ("spikingresformer_ti", IMAGENET, "11.14", -2 * 64 * 13 - 2 * 192 * 25 - 2 * 384 * 37),
    ("spikingresformer_s", IMAGENET, "17.76", -2 * 64 * 13 - 2 * 256 * 25 - 2 * 512 * 37),
    ("spikingresformer_m", IMAGENET, "35.52", -2 * 64 * 13 - 2 * 384 * 25 - 2 * 768 * 37),
    ("spikingresformer_l", IMAGENET, "60.38", 0),
]

# model | operations at 224 x 224, in billions, as torchvision states them for the dense network
OPERATIONS = {
    **{"resnet18": 1.814, "resnet34": 3.664, "resnet50": 4.089},
    **{"sew_resnet18": 1.814, "sew_resnet34": 3.664, "sew_resnet50": 4.089},
    **{"sew_resnet101": 7.801, "sew_resnet152": 11.514},
    **{"vgg11": 7.609, "vgg16": 15.470},
}
# The page with the numbers of parameters and operations, ours and the published ones.
PAGE = Path(__file__).parents[2] / "docs" / "models.md"

# A small network of each family, and the norms that are not fused, by what reads their result.
NO_NORMS: dict[str, int] = {}
FAMILIES = [
    ("mlp", {}, NO_NORMS),
    ("conv", {}, NO_NORMS),
    ("cifar_small", {}, NO_NORMS),
    ("vgg11", {"hidden": (32,)}, NO_NORMS),
    ("vggsnn", {}, NO_NORMS),
    ("resnet18", {}, NO_NORMS),
    ("sew_resnet18", {}, NO_NORMS),
    ("sew_resnet50", {}, NO_NORMS),
    ("ms_resnet18", {}, NO_NORMS),
    ("spikformer", {"depth": 1, "channels": 32, "num_heads": 4}, NO_NORMS),
    ("qkformer", {"depths": (1, 1, 1), "channels": 64}, {"max_pool2d": 2}),
    ("qkformer_10_384", {"depths": (1, 1, 1), "channels": 64, "num_heads": 4}, {"max_pool2d": 4}),
    ("sdt", {"depth": 1, "channels": 32}, {"max_pool2d": 1, "add": 1}),
    (
        "sdt_v2_15m",  # q, k, v and a projection per block, each with three norms in a row
        {"channels": (16, 16, 32, 32), "depths": (1, 1)},
        {"conv2d": 8, "operations": 8, "add": 1},
    ),
    ("sdt_v3_5m", {"channels": (16, 16, 32, 32), "depths": (1, 1)}, {"add": 1}),
    (
        "maxformer_10_384",
        {"depths": (1, 1, 1), "channels": 64, "num_heads": 4},
        {"max_pool2d": 4, "add": 1},
    ),
    (
        "spikingresformer_ti",
        {"stem": "cifar", "channels": (64, 64, 64)},
        {"operations": 6, "add": 1},
    ),
]


def near(**options) -> sf.LIF:
    """A neuron for event models."""
    return sf.LIF(surrogate=sf.surrogate.Triangle(cutoff=-0.5), **options)


# Networks on events take spikes, and neurons of a kind.
@pytest.mark.parametrize("name", ["resnet18", "vggsnn", "sdt_v2_31m", "spikingresformer_l"])
def test_builders_are_functions_with_names(name: str) -> None:
    build = getattr(sf.models, name)
    assert inspect.isfunction(build)
    assert pickle.loads(pickle.dumps(build)) is build
    text = pydoc.plain(pydoc.render_doc(build))
    shown = "".join(text.split())  # Python 3.13 breaks long signatures
    assert f"{name}(neuron:'MakeNeuron',in_channels:'int',num_classes:'int'" in shown
    assert "Build " in text
    assert "depth" not in inspect.signature(sf.models.resnet18).parameters


ORDINARY = [name for name in MODELS if not name.startswith("event-mlp")]


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def neurons(net: nn.Module) -> int:
    return sum(isinstance(m, sf.Neuron) for m in net.modules())


def test_every_model_is_in_the_table() -> None:
    assert sorted(row[0] for row in [*PUBLISHED, *ROUNDED]) == sorted(MODELS)


@pytest.mark.parametrize(("name", "arguments", "num_neurons", "num_parameters"), PUBLISHED)
def test_parameters_and_neurons(name, arguments, num_neurons, num_parameters) -> None:
    with torch.device("meta"):
        net = MODELS[name](near, *arguments)
    assert parameters(net) == num_parameters
    assert neurons(net) == num_neurons


@pytest.mark.parametrize(("name", "arguments", "published", "difference"), ROUNDED)
def test_published_millions_of_parameters(name, arguments, published, difference) -> None:
    with torch.device("meta"):
        net = MODELS[name](near, *arguments)
    unit = 10 ** (6 - len(published.partition(".")[2]))  # papers round or truncate
    assert abs(parameters(net) + difference - float(published) * 1e6) < unit


def operations(name: str) -> float:
    """Return billions of multiply-accumulates of the dense network at 224 x 224."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        MODELS[name](nn.Identity, *IMAGENET).eval()(torch.empty(1, 3, 224, 224))
    return counter.get_total_flops() / 2e9


def named(cell: str) -> list[str]:
    """Return the models in a cell of the page, such as `sew_resnet18`, `34`."""
    found = re.findall(r"`([\w-]+)`", cell)
    if " to " in cell:
        first, last = (int(name[-1]) for name in found)
        found = [f"{found[0][:-1]}{number}" for number in range(first, last + 1)]
    start = found[0][:3]
    family = [m for m in MODELS if m.startswith(start)]
    return [n if n in MODELS else next(m for m in family if m.endswith(n)) for n in found]


def test_parameters_of_the_page() -> None:
    published = {name: millions for name, _, millions, _ in ROUNDED}
    arguments = {row[0]: row[1] for row in [*PUBLISHED, *ROUNDED]}
    lines = [line.split("|") for line in PAGE.read_text().splitlines() if line.count("|") == 6]
    checked = set()
    for cells in lines[2:]:
        cell, _, theirs, ours, _ = (part.strip() for part in cells[1:-1])
        names, printed = named(cell), re.findall(r"[\d.]+", theirs)
        for name, millions in zip(names, printed, strict=bool(printed)):
            assert published.get(name, millions) == millions, name
        values = re.findall(r"\d+\.\d+", ours) or (printed if ours == "the same" else [])
        for name, millions in zip(names, values, strict=bool(values)):
            with torch.device("meta"):
                net = MODELS[name](near, *arguments[name])
            assert f"{parameters(net) / 1e6:.2f}" == millions, name
            checked.add(name)
    assert checked >= MODELS.keys() - {"mlp", "conv"} - {n for n in MODELS if "event" in n}


@pytest.mark.parametrize(("name", "billions"), OPERATIONS.items())
def test_published_operations(name: str, billions: float) -> None:
    assert operations(name) == pytest.approx(billions, abs=1e-3)


def test_operations_of_the_page() -> None:
    """Every network for ImageNet has a row: its name, the published number and ours."""
    rows = re.findall(r"^\| `(\w+)` \| ([\d.–]+) \| ([\d.]+) \|$", PAGE.read_text(), re.M)
    imagenet = [row[0] for row in [*PUBLISHED, *ROUNDED] if row[1] == IMAGENET]
    assert sorted(name for name, _, _ in rows) == sorted({*imagenet} - {"alexnet"})
    for name, published, ours in rows:
        assert published == (f"{OPERATIONS[name]:.2f}" if name in OPERATIONS else "–"), name
        assert ours == f"{operations(name):.2f}", name


def sizes(net: nn.Sequential, x: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the output channels and size of each child, without repetitions."""
    found: list[tuple[int, ...]] = []

    def note(module: nn.Module, inputs: object, y: torch.Tensor) -> None:
        if y.ndim == 4 and (not found or found[-1] != (y.shape[1], y.shape[2])):
            found.append((y.shape[1], y.shape[2]))

    for module in net:
        module.register_forward_hook(note)
    sf.Temporal(net)(x[None])
    return found


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("resnet18", 64, [(64, 32), (64, 16), (128, 8), (256, 4), (512, 2), (512, 1)]),
        (
            "resnet50",
            64,
            [(64, 32), (64, 16), (256, 16), (512, 8), (1024, 4), (2048, 2), (2048, 1)],
        ),
        ("ms_resnet34", 64, [(64, 32), (64, 16), (128, 8), (256, 4), (512, 2), (512, 1)]),
        ("cifar_large", 32, [(128, 32), (128, 16), (256, 16), (256, 8), (512, 8), (512, 4)]),
        ("cifar_small", 32, [(128, 16), (256, 8), (512, 4)]),
        ("alexnet", 64, [(64, 32), (128, 16), (256, 8), (256, 4), (384, 4), (256, 4), (256, 2)]),
        (
            "vggsnn",
            48,
            [(64, 48), (128, 48), (128, 24), (256, 24), (256, 12), (512, 12), (512, 6), (512, 3)],
        ),
        (
            "spikformer",
            32,
            [(48, 32), (96, 32), (192, 32), (192, 16), (384, 16), (384, 8), (384, 1)],
        ),
    ],
)
def test_sizes(name: str, size: int, expected: list[tuple[int, int]]) -> None:
    with torch.no_grad():
        assert sizes(MODELS[name](sf.LIF, 1, 10, (size, size)), torch.rand(2, 1, size, size)) == (
            expected
        )


@pytest.mark.parametrize(("name", "options", "unfused"), FAMILIES)
def test_spikes_gradients_and_fusing(name: str, options: dict, unfused: dict[str, int]) -> None:
    torch.manual_seed(0)
    size = (9, 13)
    net = sf.Temporal(MODELS[name](lambda: sf.LIF(threshold=0.3), 2, 5, size, **options))
    x, rates, hooks = (torch.rand(4, 3, 2, *size) < 0.5).float(), {}, []
    for label, neuron in net.neurons().items():
        hook = lambda m, x, y, label=label: rates.update({label: y.mean().item()})  # noqa: E731
        hooks.append(neuron.register_forward_hook(hook))
    expected = net(x).detach()
    for handle in hooks:
        handle.remove()
    net = sf.fuse(net)
    logits = net(x)
    assert logits.shape == (4, 3, 5)
    assert (logits - expected).norm() < 0.1 * expected.norm()  # a spike near the threshold may flip
    assert rates.keys() == net.neurons().keys()
    assert all(0.01 < rate < 1 for rate in rates.values()), rates
    logits.square().sum().backward()
    for label, parameter in net.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any() or parameter.ndim == 1, label
    readers = Counter(str(place.reason).split()[-1] for place in net.fusion.left)
    assert readers == unfused


@pytest.mark.parametrize("name", ["mlp", "conv", "ms_resnet18", "vggsnn", "spikformer"])
@pytest.mark.parametrize("size", [(8, 8), (28, 28)])
def test_other_sizes(name: str, size: tuple[int, int]) -> None:
    net = sf.Temporal(MODELS[name](sf.LIF, 1, 5, size)).eval()
    with torch.no_grad():
        assert net(torch.rand(2, 1, 1, *size)).shape == (2, 1, 5)


@pytest.mark.parametrize("name", ORDINARY)
def test_neurons_share_no_parameters(name: str) -> None:
    with torch.device("meta"):
        net = MODELS[name](sf.PLIF, 1, 10, (28, 28))
    found = [m for m in net.modules() if isinstance(m, sf.PLIF)]
    decays = {id(p) for neuron in found for p in neuron.parameters()}
    assert len(decays) == len(found)


def test_conv_of_a_small_image() -> None:
    with pytest.raises(ValueError, match="at least"):
        conv(sf.LIF, 1, 10, (3, 8))
