"""Inference of a ReLU network converted by `sf.from_ann` and by SpikingJelly, on one GPU.

    python -m benchmarks.from_ann_steps
    python -m benchmarks.from_ann_steps --T 4 32 --dtype bfloat16

The network is a ResNet with the stem for small images and fresh weights. Both conversions have the
thresholds that SpikingJelly finds: the maxima of the activations of one batch of random images.
SpikingJelly's is made by its `Converter` with the `RateCodingRecipe`, which folds norms, and runs
in multi-step mode. Its neurons are `IFNode`s, which have fused kernels, and start at half a
threshold, as ours do. In float32, their potential is float32; in bfloat16, they have explicit
precision (see `benchmarks.jelly`).

A step gives the classes of a batch, which is the same image in each of T steps. Ours gets images,
and computes the first convolution once; SpikingJelly's gets the repeated images, as its layers
read. SpikingJelly's step runs eagerly and as a CUDA graph, each also after torch.compile; ours is
fused, runs eagerly and by `sf.graph_step`, or is compiled by Inductor.

Before timing, all spikes and the logits of two samples must be equal in float64. Rounding flips
spikes in other dtypes: there, each step must repeat the logits of its own network's first step;
a compiled network, which rounds otherwise, has a first step of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import runner
from benchmarks.jelly import prepare_nodes, spikingjelly
from benchmarks.layers import DTYPES, OURS
from benchmarks.published import spikes_of
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
from benchmarks.steps import Network, Task, check_repeated, evaluation
from spikefuse.models import MODELS
from spikefuse.nn.encode import direct

JELLY = "SpikingJelly"
JELLY_COMPILED = f"{JELLY}, torch.compile"
FUSED = f"{OURS}, fused"
INDUCTOR = f"{FUSED}, Inductor"
# Eager steps come first: graphs must repeat their logits.
WAYS = (
    (JELLY, EAGER),
    (FUSED, EAGER),
    (JELLY, GRAPH),
    (FUSED, GRAPH_STEP),
    (JELLY_COMPILED, EAGER),
    (JELLY_COMPILED, GRAPH),
    (INDUCTOR, EAGER),
)
# Allowed difference of the two maxima, which convolutions of another precision may change.
ROUNDING = 0.05


class ConvertedTask(Task):
    """A network in both conversions, for a batch of random images in one precision."""

    def __init__(self, args: Any, T: int, dtype: str) -> None:
        self.T, device = T, torch.device(args.device)
        generator = torch.Generator(device).manual_seed(0)
        size = (4, 3, 8, 8) if args.quick else (args.batch, 3, 32, 32)
        images = torch.rand(size, device=device, generator=generator)
        images = images.contiguous(memory_format=self.layout)
        super().__init__(images, torch.zeros(len(images), dtype=torch.long, device=device), dtype)
        self.repeated = direct(images, T).flatten(0, 1).contiguous(memory_format=self.layout)
        self.repeated = self.repeated.unflatten(0, (T, -1))
        make = partial(MODELS[args.model], nn.ReLU, 3, 10, size[2:], stem="cifar")
        relus = self.share(make, lambda net: net(images)).eval()
        self.functional, ann2snn, recipes, self.neurons = spikingjelly(
            "functional", "ann2snn", "ann2snn.recipes", "neuron"
        )
        recipe = recipes.RateCodingRecipe([images], neuron_factory=lambda scale: self.node())
        self.jelly = ann2snn.Converter(recipe, device).convert(copy.deepcopy(relus)).eval()
        self.functional.set_step_mode(self.jelly, "m")
        self.ours = sf.from_ann(relus, images, T, share=1.0, negative="never", correct=False)
        scalers = scalers_of(self.jelly)
        for layer, (_, scaler) in zip(self.ours.conversion.layers, scalers, strict=True):
            threshold = float(scaler.scale)
            assert abs(threshold / layer.threshold - 1) < ROUNDING
            self.ours.net.get_submodule(layer.name).threshold = threshold

    def node(self) -> nn.Module:
        """Make a neuron of SpikingJelly that starts at half its threshold of 1."""
        node = self.neurons.IFNode(v_reset=None, step_mode="m")
        node.set_reset_value("v", 0.5)
        node.reset()
        return node

    def network(self, name: str) -> tuple[Network, Tensor]:
        """Return a network to measure, and its input."""
        if name in (FUSED, INDUCTOR):
            ours = sf.fuse(copy.deepcopy(self.ours), "inductor" if name == INDUCTOR else "auto")
            return Network(ours.net, lambda x: ours(direct(x, self.T)), container=ours), self.x
        net = copy.deepcopy(self.jelly)
        if self.device.type == "cuda" and self.dtype != "float32":
            prepare_nodes(net, self.device, DTYPES[self.dtype])
        run = torch.compile(net) if name == JELLY_COMPILED else net
        return Network(net, self.from_rest(net, run)), self.repeated

    def from_rest(self, net: nn.Module, run: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        """Return a call of a network of SpikingJelly that starts from rest."""

        def call(x: Tensor) -> Tensor:
            y = run(x)
            self.functional.reset_net(net)
            return y

        return call

    def equality(self) -> Record:
        """Compare two samples in float64, and return how many outputs, and the rates.

        Raises:
            AssertionError: a spike or the logits differ, or a layer does not spike.
        """
        net, ours = copy.deepcopy(self.jelly).double(), copy.deepcopy(self.ours).double()
        for before, behind in scalers_of(net):
            before.scale = 1 / behind.scale  # which was rounded
        wanted, found = spikes_of(net, self.neurons.IFNode), spikes_of(ours, sf.RateIF)
        flags = torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=True, allow_tf32=False
        )
        with torch.no_grad(), flags:
            logits = self.from_rest(net, net)(self.repeated[:, :2].double())
            result = ours(direct(self.x[:2].double(), self.T), impl="reference")
        thresholds = [ours.get_submodule(name).threshold for name in found]
        layers = zip(wanted.values(), found.values(), thresholds, strict=True)
        # Not y / v: CUDA multiplies by the rounded 1 / v, and v * (1 / v) need not be 1.
        differ = sum(int((y.reshape_as(s) != s * v).sum()) for s, y, v in layers)
        assert not differ, f"{differ} spikes differ in float64"
        error = difference([result], [logits])
        assert error < 1e-12, f"logits differ by {error:.2g} of their norm in float64"
        rates = [float(f"{s.mean().item():.4g}") for s in wanted.values()]
        assert min(rates) > 0, f"a layer does not spike: {rates}"
        outputs = sum(s.numel() for s in wanted.values())
        return {"outputs": outputs, "logits_error": error, "rates": rates}


def scalers_of(net: Any) -> list[tuple[Any, Any]]:
    """Return what scales the input and the output of each neuron, in the order of calls."""
    names = [str(node.target) for node in net.graph.nodes if node.op == "call_module"]
    prefixes = [name.removesuffix("if_node") for name in names if name.endswith("if_node")]
    return [
        (net.get_submodule(f"{name}scaler0"), net.get_submodule(f"{name}scaler1"))
        for name in prefixes
    ]


def measure_case(task: ConvertedTask, timing: Timing, quick: bool) -> Record:
    """Verify and time the steps."""
    about: Record = {"T": task.T, "batch": len(task.x), "dtype": task.dtype}
    about["float64"] = task.equality()
    made, networks = list[Contender](), dict[str, Network]()
    ways = {f"{name}, {way}": (name, way) for name, way in WAYS[: 4 if quick else None]}
    for title, (name, way) in ways.items():
        try:
            network, x = task.network(name)
        except Exception as error:  # the others are still measured
            made.append(Contender(title, unavailable=first_line(error)))
            continue
        networks[title] = network
        step = evaluation(task, network)
        made.append(contender_of(title, way, step, (x, task.labels), task.device, (network.net,)))
    expected: dict[str, Tensor] = {}

    def verify(contender: Contender, result: tuple[Tensor, None]) -> None:
        check_repeated(ways[contender.name][0], result[0], expected, task.dtype)

    contenders = measure(made, verify, timing)["contenders"]
    for found in contenders:
        found["network"], found["way"] = ways[found["name"]]
    about["fusion"] = networks[f"{FUSED}, {EAGER}"].fusion
    if {FUSED, JELLY} <= expected.keys():  # rounding flips spikes of each
        about["logits_difference"] = difference([expected[FUSED]], [expected[JELLY]])
    return about | {"contenders": contenders}


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("from_ann_steps", __doc__, rounds=5)
    add = parser.add_argument
    add("--model", choices=("resnet18", "resnet34"), default="resnet18", help="(resnet18)")
    add("--T", type=int, nargs="+", default=[8], help="time steps (8)")
    add("--batch", type=int, default=128, help="images (128)")
    add("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    args = runner.parse(parser, argv)
    timing = Timing.of(args, whole_steps=True)

    def measured(T: int, dtype: str) -> Record:
        return measure_case(ConvertedTask(args, T, dtype), timing, args.quick)

    with cudnn_search(torch.device(args.device)):
        cases = ((f"T = {T}, {dtype}", partial(measured, T, dtype))
                 for T in args.T for dtype in args.dtype)  # fmt: skip
        return runner.run_cases(args, cases)


if __name__ == "__main__":
    main()
