"""Published spiking networks before and after `sf.convert`: steps on one GPU.

    python -m benchmarks.convert
    python -m benchmarks.convert --networks "Spikformer-4-384, CIFAR-10" --dtype float32

The networks of `benchmarks/published.py` have SpikingJelly's neurons and fresh weights.
"original" is the network as it is; "converted" is `sf.fuse(sf.convert(network))`. Only
"SEW-ResNet18 in containers" is written for one time step, so only its batch norms are fused (see
docs/converting.md).
Each runs eagerly and as a CUDA graph of the whole step: the original by torch.cuda.graph, the
converted by `sf.graph_step`, which also copies input, labels and results.

A training step is forward, the cross entropy of the mean over time, backward, and a step of fused
SGD; an evaluation step is forward without gradients. float32 has TF32 convolutions, PyTorch's
default; bfloat16 uses autocast. SpikingJelly chooses its kernels itself. Under autocast, its nodes
would have a bfloat16 state, for which it has only an eager loop: here they get a float32 state, for
which it has kernels.

Before timing, all spikes and the logits of two samples must be equal in float64, in training mode.
Rounding flips spikes in other dtypes: there, each step must repeat the logits of its own network's
first eager step.
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
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import published, runner
from benchmarks.layers import DTYPES, spikingjelly
from benchmarks.networks import LEARNING_RATE
from benchmarks.runner import (
    EAGER,
    GRAPH,
    GRAPH_STEP,
    NO_GRAPHS,
    Contender,
    Record,
    Timing,
    contender_of,
    cudnn_search,
    difference,
    measure,
)

ORIGINAL, CONVERTED = "original", "converted"
STEPS = ("training", "evaluation")
# The eager steps come first: graphs must repeat their logits.
WAYS = ((ORIGINAL, EAGER), (CONVERTED, EAGER), (ORIGINAL, GRAPH), (CONVERTED, GRAPH_STEP))
TITLES = tuple(f"{name}, {way}" for name, way in WAYS)
# Allowed relative difference of the logits of two steps of a network: rounding flips spikes.
REPEATED = {"float32": 0.1, "bfloat16": 0.3}
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
    channels_last: bool = False
    T: int = 4


SEW = {"stem": (7, 2), "widths": (64, 128, 256, 512), "blocks": (2, 2, 2, 2)}
CIFAR: dict[str, Any] = {"shape": (3, 32, 32), "classes": 10, "batch": 64}
IMAGENET: dict[str, Any] = {"shape": (3, 224, 224), "classes": 1000, "batch": 32}
NETWORKS = {
    "SEW-ResNet18, ImageNet": Case(
        published.SEWResNet, **IMAGENET, sizes=SEW, channels_last=True
    ),
    "SEW-ResNet18 in containers, ImageNet": Case(
        published.sew_sequential, **IMAGENET, sizes=SEW, one_step=True, channels_last=True
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


class Task:
    """A case on one device: the network, whose weights all others share, and its batch.

    Running statistics equal the statistics of the batch. Images are uniform.
    """

    def __init__(self, case: Case, device: torch.device, quick: bool) -> None:
        self.case, self.device = case, device
        (self.functional,) = spikingjelly("functional")
        self.T, self.batch = (2, 4) if quick else (case.T, case.batch)
        shape, classes, sizes = case.shape, case.classes, case.sizes
        if quick:
            shape, classes, sizes = (2, 16, 16), 10, {}
        generator = torch.Generator(device).manual_seed(0)
        size = (self.T, self.batch) if case.one_step else (self.batch,)
        layout = torch.channels_last if case.channels_last else torch.contiguous_format
        x = 2 * torch.rand(math.prod(size), *shape, generator=generator, device=device)
        self.x = x.contiguous(memory_format=layout).unflatten(0, size)
        self.labels = torch.randint(classes, (self.batch,), generator=generator, device=device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = case.make(self.T, channels=shape[0], classes=classes, **sizes)
        self.net.to(device, memory_format=layout)
        norms = [m for m in self.net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 1.0
        with torch.no_grad():
            self.call(self.net, self.x)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        self.state = {name: value.clone() for name, value in self.net.state_dict().items()}

    def call(self, net: Callable[[Tensor], Any], x: Tensor, name: str = ORIGINAL) -> Tensor:
        """Return the logits, `[B, classes]`, the mean over time."""
        y = net(x)
        if name == ORIGINAL:
            self.functional.reset_net(net)
        y = y[0] if isinstance(y, tuple) else y
        return y.mean(0) if self.case.one_step else y

    def converted(self, net: nn.Module) -> nn.Module:
        """Convert a copy."""
        ours = sf.convert(net, copy=True)
        return sf.Temporal(ours) if self.case.one_step else ours

    def network(self, name: str, dtype: str) -> tuple[nn.Module, str]:
        """Make the network to measure, and say what was done."""
        if name == CONVERTED:
            return sf.fuse(self.converted(self.net)), ""
        net, (neuron,) = copy.deepcopy(self.net), spikingjelly("neuron")
        nodes = [m for m in net.modules() if isinstance(m, neuron.BaseNode)]
        kind = "if" if isinstance(nodes[0], neuron.IFNode) else "lif"
        note = self.functional.neuron_implementation(kind, self.device)["implementation"]
        if dtype == "float32":
            return net, f"SpikingJelly's implementation {note}"
        for node in nodes:
            node.materialize_states = float32_states
        return net, f"SpikingJelly's implementation {note}, given float32 states"

    def restore(self, net: nn.Module) -> None:
        """Copy the shared weights back into a network."""
        net = net.net if isinstance(net, sf.Temporal) else net
        with torch.no_grad():
            for name, value in net.state_dict().items():
                value.copy_(self.state[name])

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
            expected, logits = self.call(net, x), self.call(run, x, CONVERTED)
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

    def step(
        self, net: nn.Module, name: str, kind: str, dtype: str
    ) -> Callable[[Tensor, Tensor], Any]:
        """Return a function of images and labels that runs a step and returns logits and loss."""
        autocast = partial(
            torch.autocast, self.device.type, torch.bfloat16, enabled=dtype == "bfloat16"
        )
        if kind == "evaluation":
            net.eval()

            def evaluate(x: Tensor, labels: Tensor) -> tuple[Tensor, None]:
                with torch.no_grad(), autocast():
                    return self.call(net, x, name).float(), None

            return evaluate
        net.train()
        optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE, momentum=0.9, fused=True)

        def train(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            optimizer.zero_grad()
            with autocast():
                logits = self.call(net, x, name).float()
                loss = F.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            return logits.detach(), loss.detach()

        return train


def float32_states(inputs: Any, states: Any, step_mode: str) -> Any:
    """Return the states of a node of SpikingJelly at rest, in place of its method."""
    return torch.full_like(inputs[0][0], states[0], dtype=torch.float32), *states[1:]


def measure_case(task: Task, timing: Timing, checked: Record, kind: str, dtype: str) -> Record:
    """Verify and time the steps of one kind and dtype."""
    networks: list[nn.Module] = []
    made: dict[str, tuple[str, str, Contender]] = {}
    fusion, note = "", ""
    for title, (name, way) in zip(TITLES, WAYS, strict=True):
        if way != EAGER and task.device.type != "cuda":
            made[title] = name, way, Contender(title, unavailable=NO_GRAPHS)
            continue
        net, done = task.network(name, dtype)
        note = done or note
        networks.append(net)
        step = task.step(net, name, kind, dtype)
        contender = contender_of(title, way, step, (task.x, task.labels), task.device)
        made[title] = name, way, contender
    expected: dict[str, Tensor] = {}

    def verify(contender: Contender, result: tuple[Tensor, Tensor | None]) -> None:
        logits, loss = result
        name, _, _ = made[contender.name]
        assert logits.isfinite().all(), "the logits are not finite"
        error = difference([logits], [expected.setdefault(name, logits.clone())])
        assert error <= REPEATED[dtype], (
            f"the logits differ by {error:.3g} of the eager step's norm"
        )
        if loss is not None:
            found = F.cross_entropy(logits, task.labels)
            assert torch.allclose(loss, found, rtol=1e-3), f"the loss is {loss}, not {found}"

    def prepare() -> None:
        for net in networks:
            task.restore(net)

    contenders = measure([c for _, _, c in made.values()], verify, timing, prepare=prepare)[
        "contenders"
    ]
    for found in contenders:
        found["side"], found["way"], _ = made[found["name"]]
    for net in networks:
        if isinstance(net, sf.Temporal):
            fusion = net.fusion.summary
    about: Record = {"steps": kind, "dtype": dtype, "T": task.T, "batch": task.batch}
    layout = "channels-last" if task.case.channels_last else "contiguous"
    about |= {"layout": layout, "float64": checked, "note": note}
    if fusion:
        about["fusion"] = fusion
    if len(expected) == 2:  # rounding flips spikes of both
        error = difference([expected[CONVERTED]], [expected[ORIGINAL]])
        about["logits_difference"] = float(f"{error:.3g}")
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
    def checked(name: str) -> tuple[Task, Record]:
        task = Task(NETWORKS[name], device, args.quick)
        return task, task.equality()

    def measured(name: str, kind: str, dtype: str) -> Record:
        task, equality = checked(name)
        return {"network": name} | measure_case(task, timing, equality, kind, dtype)

    with cudnn_search(device):
        return runner.run_cases(args, (
            (f"{name}, {dtype}, {kind}", partial(measured, name, kind, dtype))
            for name in args.networks
            for dtype in args.dtype
            for kind in args.steps
        ))  # fmt: skip


if __name__ == "__main__":
    main()
