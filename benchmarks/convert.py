"""Published spiking networks before and after `sf.convert`: steps on one GPU.

    python -m benchmarks.convert
    python -m benchmarks.convert --networks "Spikformer-4-384, CIFAR-10" --dtype float32

The networks of `benchmarks/published.py` have SpikingJelly's neurons and fresh weights.
"original" is the network as it is; "converted" is `sf.fuse(sf.convert(network))`. Only
"SEW-ResNet18 in containers" is written for one time step (see docs/converting.md).

Steps are as in `benchmarks.networks`, eager and as a CUDA graph of the whole step: the original by
torch.cuda.graph, also after torch.compile, and the converted by `sf.graph_step`, which also copies
input, labels and results. SpikingJelly's nodes have explicit precision (see `benchmarks.jelly`). In
an evaluation step, its `fuse_conv_bn_eval_modules` folds norms of the original into convolutions
where it can trace the network.

Before timing, all spikes and the logits of two samples must be equal in float64, in training mode.
Rounding flips spikes in other dtypes: there, each step must repeat the logits of its own network's
first eager step, after torch.compile, too, which rounds otherwise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import published, runner
from benchmarks.jelly import prepare_nodes, spikingjelly
from benchmarks.layers import DTYPES
from benchmarks.runner import (
    EAGER,
    GRAPH,
    GRAPH_STEP,
    Contender,
    Record,
    Timing,
    contender_of,
    cudnn_search,
    difference,
    first_line,
    measure,
)
from benchmarks.steps import STEPS, Network, Task, check_repeated

ORIGINAL, CONVERTED = "original", "converted"
COMPILED = f"{ORIGINAL}, torch.compile"
# The eager steps come first: graphs must repeat their logits.
WAYS = (
    (ORIGINAL, EAGER),
    (CONVERTED, EAGER),
    (ORIGINAL, GRAPH),
    (CONVERTED, GRAPH_STEP),
    (COMPILED, EAGER),
    (COMPILED, GRAPH),
)
TITLES = tuple(f"{name}, {way}" for name, way in WAYS)
# Layers of neurons whose rate is in these limits, and how many of them there must be.
RATES, SHARE = (0.005, 0.995), 0.7


@dataclass(frozen=True)
class Case:
    """A network, its input, and its published sizes.

    With `one_step`, the input is `[T, B, C, H, W]` in place of images `[B, C, H, W]`, and the
    converted network is for one time step.
    """

    make: Callable[..., nn.Module]  # takes T and `sizes`
    shape: tuple[int, int, int]  # C, H, W
    classes: int
    batch: int
    sizes: dict[str, Any] = field(default_factory=dict)
    one_step: bool = False
    layout: torch.memory_format = torch.contiguous_format


SEW = {"stem": (7, 2), "widths": (64, 128, 256, 512), "blocks": (2, 2, 2, 2)}
CIFAR: dict[str, Any] = {"shape": (3, 32, 32), "classes": 10, "batch": 64}
IMAGENET: dict[str, Any] = {"shape": (3, 224, 224), "classes": 1000, "batch": 32}
NETWORKS = {
    "SEW-ResNet18, ImageNet": Case(
        published.SEWResNet, **IMAGENET, sizes=SEW, layout=torch.channels_last
    ),
    "SEW-ResNet18 in containers, ImageNet": Case(
        published.sew_sequential, **IMAGENET, sizes=SEW, one_step=True, layout=torch.channels_last
    ),
    "Spikformer-8-384, ImageNet": Case(
        published.spikformer,
        **IMAGENET,
        sizes={"widths": (48, 96, 192, 384), "pools": 4, "heads": 12, "depth": 8},
    ),
    "Spikformer-4-384, CIFAR-10": Case(
        published.spikformer,
        **CIFAR,
        sizes={"widths": (48, 96, 192, 384), "pools": 2, "heads": 12, "depth": 4},
    ),
    "Spike-driven Transformer-2-512, CIFAR-10": Case(
        published.SpikeDrivenTransformer,
        **CIFAR,
        sizes={"widths": (64, 128, 256, 512), "pools": 2, "heads": 8, "depth": 2},
    ),
    "QKFormer-4-384, CIFAR-10": Case(
        published.qkformer, **CIFAR, sizes={"widths": (96, 192, 384), "heads": 6, "depth": 2}
    ),
}  # fmt: skip


class PublishedTask(Task):
    """A case in one precision: its network and its batch of uniform images."""

    def __init__(self, case: Case, dtype: str, device: torch.device, quick: bool) -> None:
        self.case, self.layout, self.quick = case, case.layout, quick
        (self.functional,) = spikingjelly("functional")
        self.T, batch = (2, 4) if quick else (4, case.batch)
        shape, classes, sizes = case.shape, case.classes, case.sizes
        if quick:
            shape, classes, sizes = (2, 16, 16), 10, {}
        options: dict[str, Any] = {"device": device}
        options["generator"] = torch.Generator(device).manual_seed(0)
        size = (self.T, batch) if case.one_step else (batch,)
        x = 2 * torch.rand(math.prod(size), *shape, **options)
        x = x.contiguous(memory_format=case.layout).unflatten(0, size)
        super().__init__(x, torch.randint(classes, (batch,), **options), dtype)
        make = partial(case.make, self.T, channels=shape[0], classes=classes, **sizes)
        self.net = self.share(make, lambda net: self.original(net)(x))

    def original(
        self, net: nn.Module, run: Callable[[Tensor], Any] | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Return a call of a network of SpikingJelly, by `run` if given, from rest."""

        def call(x: Tensor) -> Tensor:
            y = net(x) if run is None else run(x)
            self.functional.reset_net(net)
            return self.over_time(y)

        return call

    def over_time(self, y: Any) -> Tensor:
        """Return logits `[T, B, classes]`, with T = 1 if the network has taken their mean."""
        y = y[0] if isinstance(y, tuple) else y
        return y if self.case.one_step else y.unsqueeze(0)

    def converted(self, net: nn.Module) -> nn.Module:
        """Convert a copy."""
        ours = sf.convert(net, copy=True)
        return sf.Temporal(ours) if self.case.one_step else ours

    def network(self, side: str, kind: str) -> Network:
        """Make the network to measure; the note of the original says what was done."""
        if side == CONVERTED:
            ours = sf.fuse(self.converted(self.net))
            net = ours.net if self.case.one_step else ours
            return Network(net, lambda x: self.over_time(ours(x)), container=ours)
        net, notes = copy.deepcopy(self.net), []
        if self.device.type == "cuda":
            prepare_nodes(net, self.device, DTYPES[self.dtype])
        if kind == "evaluation":
            try:
                (fusion,) = spikingjelly("functional.conv_bn_fusion")
                net = fusion.fuse_conv_bn_eval_modules(net.eval())
            except Exception as error:
                notes.append(f"norms not folded: {first_line(error)}")
        run = torch.compile(net) if side == COMPILED else net
        return Network(net, self.original(net, run), note="; ".join(notes))

    def equality(self) -> Record:
        """Compare two samples in float64, and return how many outputs, and the rates.

        Raises:
            AssertionError: a spike or the logits differ, or too few layers spike.
        """
        (neuron,) = spikingjelly("neuron")
        x = (self.x[:, :2] if self.case.one_step else self.x[:2]).double()
        net = copy.deepcopy(self.net).double()
        ours = self.converted(net)
        wanted = published.spikes_of(net, neuron.BaseNode)
        found = published.spikes_of(ours, sf.Neuron)
        run = partial(ours, impl="reference") if self.case.one_step else ours
        flags = torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=True, allow_tf32=False
        )
        with torch.no_grad(), flags:
            expected, logits = self.original(net)(x), self.over_time(run(x))
        differ = sum(
            int((a.reshape(y.shape) != y).sum())
            for a, y in zip(found.values(), wanted.values(), strict=True)
        )
        assert not differ, f"{differ} spikes differ in float64"
        error = difference([logits], [expected])
        assert error < 1e-12, f"logits differ by {error:.2g} of their norm in float64"
        rates = [y.mean().item() for y in wanted.values()]
        inside = sum(RATES[0] < rate < RATES[1] for rate in rates)
        assert inside >= SHARE * len(rates), f"{inside} of {len(rates)} layers spike: {rates}"
        return {
            "outputs": sum(y.numel() for y in wanted.values()),
            "logits_error": error,
            "rates": [float(f"{rate:.4g}") for rate in rates],
        }


def measure_case(task: PublishedTask, timing: Timing, checked: Record, kind: str) -> Record:
    """Verify and time the steps of one kind."""
    networks: list[Network] = []
    made: list[Contender] = []
    # Compilers take longer than quick runs may.
    ways = WAYS[:4] if task.quick else WAYS
    for title, (side, way) in zip(TITLES, ways, strict=False):
        networks.append(task.network(side, kind))
        step = STEPS[kind](task, networks[-1])
        inputs, parts = (task.x, task.labels), (networks[-1].net,)
        made.append(contender_of(title, way, step, inputs, task.device, parts))
    expected: dict[str, Tensor] = {}

    def verify(contender: Contender, result: tuple[Tensor, Tensor | None]) -> None:
        side, _ = WAYS[TITLES.index(contender.name)]
        check_repeated(side, result[0], expected, task.dtype)

    def prepare() -> None:
        for network in networks if kind == "training" else ():
            task.restore(network.net)

    contenders = measure(made, verify, timing, prepare=prepare)["contenders"]
    for found, (side, way) in zip(contenders, ways, strict=True):
        found |= {"side": side, "way": way}
    layout = "channels-last" if task.layout == torch.channels_last else "contiguous"
    about: Record = {"steps": kind, "dtype": task.dtype, "T": task.T, "batch": len(task.labels)}
    about |= {"layout": layout, "float64": checked, "note": networks[0].note}
    about["fusion"] = networks[TITLES.index(f"{CONVERTED}, {EAGER}")].fusion
    for side in {CONVERTED, COMPILED} & expected.keys():  # rounding flips spikes of each
        if ORIGINAL in expected:
            error = difference([expected[side]], [expected[ORIGINAL]])
            about[f"logits_difference, {side}"] = float(f"{error:.3g}")
    return about | {"contenders": contenders}


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("convert", __doc__, rounds=5)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS),
                        metavar="NETWORK", help=f"of {'; '.join(NETWORKS)}")  # fmt: skip
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="both, or float32 if quick")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    args = runner.parse(parser, argv)
    args.dtype = args.dtype or list(DTYPES)[: 1 if args.quick else None]
    timing, device = Timing.of(args, whole_steps=True), torch.device(args.device)

    @lru_cache(maxsize=1)
    def checked(name: str) -> Record:
        return PublishedTask(NETWORKS[name], "float32", device, args.quick).equality()

    def measured(name: str, kind: str, dtype: str) -> Record:
        equality = checked(name)
        task = PublishedTask(NETWORKS[name], dtype, device, args.quick)
        return {"network": name} | measure_case(task, timing, equality, kind)

    with cudnn_search(device):
        return runner.run_cases(args, (
            (f"{name}, {dtype}, {kind}", partial(measured, name, kind, dtype))
            for name in args.networks
            for dtype in args.dtype
            for kind in args.steps
        ))  # fmt: skip


if __name__ == "__main__":
    main()
