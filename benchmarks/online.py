"""Learning rules of sf.Online: time, memory over T, agreement with backpropagation, and accuracy.

    python -m benchmarks.online time                      a step on a whole sequence
    python -m benchmarks.online memory                    memory and time in parts of 100 steps
    python -m benchmarks.online cosine                    gradients of deeper networks
    python -m benchmarks.online cues --seeds 0 1 2        the task of evidence accumulation
    python -m benchmarks.online digits --seeds 0 1 2      digits, one row of pixels in each step

`time`: forward and backward of a network of two layers of LIF neurons and a linear readout, by each
rule and by backpropagation through time. SpikingJelly's loops are its nodes for SLTT and OTTT, one
backward pass in each step, as its documentation says. Gradients of the second layer must agree with
ours; its OTTT has no trace of the input of the network. One layer of recurrent ALIF neurons is
measured in the same way, and in parts of 100 steps. Parts must give the gradients of the whole
sequence.

`memory`: peak bytes beyond those before a run, and time, for sequences of several lengths. On a CPU
the bytes come from PyTorch's profiler, which sees all allocations of tensors.

`cosine`: of the angle between the gradient by a rule and that of backpropagation through time, for
networks of one to four layers with random weights.

`cues`: seven cues on the left or the right, and the network tells on which side more were, after a
delay (Bellec et al., Nature Communications 11, 2020, Fig. 3). 100 recurrent neurons, half of them
adaptive, whose filtered spikes a linear readout reads in the last 150 steps; Adam, and a penalty on
rates that differ from 10 Hz. There is no refractory period. `--delay` shortens the 1,050 steps.

`digits`: the 8x8 digits of scikit-learn, or MNIST (`--data mnist`), row after row, or the spoken
digits of `benchmarks.spoken_digits` (`--data shd`), where every step answers; the network of
`cues`. There is a row for each rule and seed, with the share of right answers on examples that were
not trained.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import spikefuse as sf
from benchmarks import plots, runner
from benchmarks.jelly import spikingjelly
from benchmarks.layers import OURS
from benchmarks.runner import EAGER, GRAPH, Contender, Record, Timing, contender_of, measure
from benchmarks.spoken_digits import CLASSES, HELD_OUT, INPUTS, RECORDINGS, spikes
from spikefuse import data
from spikefuse.data import Frames, split
from spikefuse.data.files import default_directory

BPTT, *RULES = ALL = ("bptt", "sltt", "ottt", "e-prop", "d-rtrl")
DECAY, WIDTH = 0.9, 4.0
PART = 100  # steps
JELLY = "SpikingJelly loop"


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("online", __doc__, rounds=7)
    add = parser.add_argument
    add("what", choices=("time", "memory", "cosine", "cues", "digits"))
    add("--T", type=int, help="steps of `time` (100 on a CPU, 1000 on a GPU)")
    add("--batch", type=int, default=64, help="(64)")
    add("--hidden", type=int, default=256, help="neurons of a layer of time and memory (256)")
    add("--rules", nargs="+", default=list(ALL), choices=ALL, help="(all)")
    add("--seeds", type=int, nargs="+", default=[0], help="of the tasks (0)")
    add("--iterations", type=int, default=300, help="training steps of the tasks (300)")
    add("--every", type=int, default=20, help="training steps between evaluations (20)")
    add("--delay", type=int, default=1050, help="steps between the cues and the answer (1050)")
    add("--feedback", default="symmetric", choices=("symmetric", "random", "adaptive"))
    add("--data", default="digits", choices=("digits", "mnist", "shd"), help="of digits (digits)")
    add("--data-dir", type=Path, default=default_directory(), help="data folder")
    args = runner.parse(parser, argv)
    if args.quick:
        args.T, args.batch, args.hidden, args.iterations, args.every = 5, 4, 8, 2, 1
        args.delay = 10
    args.usual_name = f"online_{args.what if args.data == 'digits' else args.data}"
    cases = {"time": times, "memory": memories, "cosine": cosines, "cues": tasks, "digits": tasks}
    torch.manual_seed(0)
    plot = plots.online_memory if args.what == "memory" else None
    return runner.run_cases(args, cases[args.what](args), plot=plot)


Cases = Iterator[tuple[str, Callable[[], Record]]]


# Time and memory


def network(widths: tuple[int, ...], reset: str = "soft", seed: int = 0) -> sf.Temporal:
    """Linear layers, LIF neurons in between, of which some fire."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in pairwise(widths[:-1]):
        neuron = sf.LIF(
            DECAY, reset=reset, detach_reset=True, surrogate=sf.surrogate.Sigmoid(WIDTH)
        )
        layers += [nn.Linear(a, b, bias=False), neuron]
        nn.init.normal_(layers[-2].weight, std=1.5 / math.sqrt(a))
    return sf.Temporal(nn.Sequential(*layers, nn.Linear(*widths[-2:], bias=False)))


def times(args: argparse.Namespace) -> Cases:
    device, N = torch.device(args.device), args.hidden
    T = args.T or (1000 if device.type == "cuda" else 100)
    x = torch.bernoulli(torch.full((T, args.batch, N), 0.1)).to(device)
    grad = torch.randn(T, args.batch, 10).to(device)
    about = {"T": T, "B": args.batch, "N": N}
    timing = Timing.of(args, whole_steps=True)

    def step(call: Callable[[Tensor], Tensor], net: nn.Module) -> list[Tensor]:
        return [*torch.autograd.grad(call(x), [*net.parameters()], grad)]

    def in_parts(learner: sf.Online, net: nn.Module) -> list[Tensor]:
        totals, state = [torch.zeros_like(p) for p in net.parameters()], None
        for now, error in zip(x.split(PART), grad.split(PART), strict=True):
            y, state = learner(now, state=state, return_state=True)
            torch._foreach_add_(totals, torch.autograd.grad(y, [*net.parameters()], error))
        return totals

    def case(rule: str, net: sf.Temporal, others: Sequence[Contender] = ()) -> Record:
        learner = sf.Online(net, rule)
        expected = step(learner, net)
        runs: dict[str, Callable[[], list[Tensor]]] = {
            BPTT: partial(step, net, net),
            rule: partial(step, learner, net),
        }
        if net is recurrent:
            chunked = sf.Online(net, rule, in_place=True)
            runs[f"{rule}, parts of {PART}"] = partial(in_parts, chunked, net)
        contenders = [
            contender_of(f"{OURS}, {name}", EAGER, run, (), device) for name, run in runs.items()
        ]
        if device.type == "cuda":
            for name, run in runs.items():
                contenders.append(contender_of(f"{OURS}, {name}, {GRAPH}", GRAPH, run, (), device))

        def verify(contender: Contender, result: list[Tensor]) -> None:
            if BPTT in contender.name:
                return
            assert all(g.isfinite().all() for g in result)
            compared = slice(1, 2) if contender in others else slice(None)
            error = runner.difference(result[compared], expected[compared])
            assert error < 1e-3, "gradients differ"

        return about | {"rule": rule} | measure([*contenders, *others], verify, timing)

    rules = [rule for rule in args.rules if rule != BPTT]
    feed_forward, recurrent = network((N, N, N, 10)).to(device), recurrent_network(N).to(device)
    for rule in rules:
        others = [jelly(rule, feed_forward, x, grad)] if rule in ("sltt", "ottt") else []
        yield f"{rule}, T={T}", partial(case, rule, feed_forward, others)
    for rule in rules:
        yield f"recurrent ALIF, {rule}, T={T}", partial(case, rule, recurrent)


def recurrent_network(hidden: int) -> sf.Temporal:
    """One layer of recurrent ALIF neurons, of which some fire, and a linear readout."""
    neuron = sf.ALIF(DECAY, reset="soft", detach_reset=True, surrogate=sf.surrogate.Sigmoid(WIDTH))
    first, last = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, 10, bias=False)
    nn.init.normal_(first.weight, std=1.5 / math.sqrt(hidden))
    return sf.Temporal(nn.Sequential(first, sf.Recurrent(neuron, hidden), last))


def jelly(rule: str, net: sf.Temporal, x: Tensor, grad: Tensor) -> Contender:
    """SpikingJelly's nodes in a loop over time, with a backward pass in each step."""
    name = f"{JELLY}, {rule}"
    try:
        functional, neuron, layer, surrogate, online = spikingjelly(
            "functional", "neuron", "layer", "surrogate", "learning.online_learning"
        )
    except Exception as error:
        return Contender(name, unavailable=runner.first_line(error))
    node = {"sltt": neuron.SLTTLIFNode, "ottt": neuron.OTTTLIFNode}[rule]
    options = {"tau": 1 / (1 - DECAY), "decay_input": False, "v_reset": None}
    layers = [m for m in net.net if isinstance(m, nn.Linear)]
    parts: list[nn.Module] = []
    for linear in layers[:-1]:
        parts += [linear, node(**options, surrogate_function=surrogate.Sigmoid(alpha=WIDTH))]
    container = layer.OTTTSequential if rule == "ottt" else nn.Sequential
    loop, weights = container(*parts, layers[-1]).to(x.device), [m.weight for m in layers]

    def run() -> list[Tensor]:
        for weight in weights:
            weight.grad = None
        for now, error in zip(x, grad, strict=True):
            loop(now).backward(error)
            online.detach_net(loop)
        functional.reset_net(loop)
        return [weight.grad.clone() for weight in weights]

    return Contender(name, run)


def memories(args: argparse.Namespace) -> Cases:
    device = torch.device(args.device)
    net = network((args.hidden, args.hidden, args.hidden, 10), "hard").to(device)
    lengths, part = ((10, 20), 5) if args.quick else ((100, 300, 1000, 3000, 10000), PART)

    def whole(x: Tensor) -> None:
        net(x).sum().backward()

    def in_parts(rule: str, x: Tensor) -> None:
        learner, state = sf.Online(net, rule, in_place=True), None
        for now in x.split(part):
            y, state = learner(now, state=state, return_state=True)
            y.sum().backward()

    def case(rule: str, T: int) -> Record:
        # One part, expanded: the sequence itself is not counted.
        x = torch.bernoulli(torch.full((1, args.batch, args.hidden), 0.1)).to(device)
        x = x.expand(T, -1, -1)
        run = partial(whole, x) if rule == "whole" else partial(in_parts, rule, x)
        run()
        seconds = []
        for _ in range(args.rounds):
            start = time.perf_counter()
            run()
            runner.synchronize(device)
            seconds.append(time.perf_counter() - start)
        # The gradients of parameters, to which runs add, are there before.
        found = {"seconds": statistics.median(seconds), "rounds": seconds}
        return {"rule": rule, "T": T} | found | {"peak_bytes": peak_bytes(run, device)}

    for rule in ("whole", *args.rules):
        yield from ((f"{rule}, T={T}", partial(case, rule, T)) for T in lengths)


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """The largest number of bytes that tensors hold during a run, beyond those before it."""
    if device.type == "cuda":
        return runner.GpuClock(device).memory(Contender("", run))["peak_bytes"]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    held = peak = 0
    for _, num_bytes in found:
        held += num_bytes
        peak = max(peak, held)
    return peak


# Agreement


def cosines(args: argparse.Namespace) -> Cases:
    T, N = (args.T or 100), args.hidden // 4

    def case(rule: str, depth: int) -> Record:
        found = []
        for seed in range(2 if args.quick else 8):
            net = network((N,) * (depth + 1) + (10,), "hard", seed)
            for neuron in net.neurons().values():
                neuron.detach_reset = False
            x = torch.bernoulli(torch.full((T, args.batch, N), 0.1))
            labels = torch.randint(10, (args.batch,))
            pair = []
            for name in (BPTT, rule):
                net.zero_grad()
                F.cross_entropy(sf.Online(net, name)(x).mean(0), labels).backward()
                pair.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
            found.append(float(F.cosine_similarity(*pair, dim=0)))
        return {"rule": rule, "layers": depth, "cosine": runner.spread(found)}

    for depth in (1, 2, 3, 4):
        for rule in args.rules:
            if rule != BPTT:
                yield f"{rule}, {depth} layers", partial(case, rule, depth)


# Tasks


class Filtered(sf.ALIF):
    """ALIF as of e-prop, whose second output is its spikes filtered as a leaky readout does."""

    trace = sf.State()

    def step(self, x, v, a, trace):  # type: ignore[no-untyped-def, override]
        h = self.charge(x, v)
        s, _ = self.fire(h, self.threshold + self.beta * a)
        trace = self.decay * trace + s
        a_next = self.adaptation_decay * a + s
        return (s, trace), (self.after(h, s, self.threshold), a_next, trace)


class Reservoir(nn.Module):
    """Recurrent neurons, the last half of them adaptive, and a linear readout."""

    def __init__(self, inputs: int, hidden: int, classes: int, tau_a: float) -> None:
        super().__init__()
        decay, rho = math.exp(-1 / 20), math.exp(-1 / tau_a)
        beta = torch.zeros(hidden)
        beta[hidden // 2 :] = 1.7 * (1 - rho) / (1 - decay)
        neuron = Filtered(
            decay, 0.6, rho, beta, reset="soft", surrogate=sf.surrogate.Triangle(0.6, 0.3 / 0.6)
        )
        self.first = nn.Linear(inputs, hidden, bias=False)
        self.neurons = sf.Recurrent(neuron, hidden, self_connections=False)
        self.out = nn.Linear(hidden, classes, bias=False)
        with torch.no_grad():
            for weight in (self.first.weight, self.neurons.weight):
                weight.normal_(std=1 / math.sqrt(weight.shape[1]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spikes, trace = self.neurons(self.first(x))
        return self.out(trace), spikes


def cues(batch: int, delay: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Spikes `[T, B, 40]` of ten neurons each for left, right, the answer and noise; labels. A
    negative batch has as many examples."""
    batch = abs(batch)
    bias = torch.where(torch.rand(batch, 1) < 0.5, 0.3, 0.7)
    sides = (torch.rand(batch, 7) < bias).long()
    rates = torch.zeros(7 * 150 + delay + 150, batch, 4, 10)
    for i in range(7):
        shown = F.one_hot(sides[:, i], 4)[:, :, None] * 0.04
        rates[150 * i + 50 : 150 * i + 150] = shown
    rates[-150:, :, 2] = 0.04
    rates[:, :, 3] = 0.01
    return torch.bernoulli(rates).flatten(2).to(device), (sides.sum(1) > 3).long().to(device)


def examples(args: argparse.Namespace, seed: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a function that draws rows of pixels `[T, B, side]`, each for five steps, or spikes
    `[T, B, units]`, and labels; of training examples, or for a negative batch of test examples."""
    if args.data == "shd":
        recordings = Frames(*spikes(args.data_dir / RECORDINGS), (INPUTS,), bits=1)
        parts: Sequence[Any] = split(recordings, HELD_OUT, seed)
    else:
        parts = data.load(args.data, args.data_dir)

    def draw(batch: int) -> tuple[Tensor, Tensor]:
        part = parts[batch < 0]
        chosen = part[torch.randint(len(part), (abs(batch),))]
        x = chosen.pixels.transpose(0, 1).float()
        if args.data != "shd":
            x = chosen.pixels.squeeze(1).transpose(0, 1).repeat_interleave(5, 0) / 255
        return x.to(args.device), chosen.labels.to(args.device)

    return draw


def tasks(args: argparse.Namespace) -> Cases:
    for rule in args.rules:
        for seed in args.seeds:
            yield f"{rule}, seed {seed}", partial(train, args, rule, seed)


def train(args: argparse.Namespace, rule: str, seed: int) -> Record:
    device = torch.device(args.device)
    torch.manual_seed(seed)
    if args.what == "cues":
        draw = partial(cues, delay=args.delay, device=device)
        inputs, classes, tau_a, answer = 40, 2, 2000.0, 150
    else:
        draw = examples(args, seed)
        x, _ = draw(1)
        inputs, tau_a = x.shape[-1], float(len(x))
        classes, answer = (CLASSES, len(x)) if args.data == "shd" else (10, 5)
    net = sf.Temporal(Reservoir(inputs, 8 if args.quick else 100, classes, tau_a)).to(device)
    learner = sf.Online(net, rule, args.feedback if rule == "e-prop" else "symmetric")
    optimizer = torch.optim.Adam([p for p in learner.parameters() if p.requires_grad], lr=5e-3)
    curve, seconds = [], 0.0
    for i in range(args.iterations):
        x, labels = draw(args.batch)
        start = time.perf_counter()
        y, spikes = learner(x)
        loss = F.cross_entropy(y[-answer:].flatten(0, 1), labels.repeat(answer))
        loss = loss + ((spikes.mean((0, 1)) - 0.01) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        runner.synchronize(device)
        seconds += time.perf_counter() - start
        if (i + 1) % args.every == 0:
            with torch.no_grad():
                x, labels = draw(-2 * args.batch)
                right = net(x)[0][-answer:].mean(0).argmax(1) == labels
            point = {"iteration": i + 1, "seconds": round(seconds, 2), "loss": loss.item()}
            curve.append(point | {"accuracy": right.float().mean().item()})
            print(curve[-1], flush=True)
    last = curve[-5:]
    accuracy = sum(point["accuracy"] for point in last) / len(last)
    return {"rule": rule, "seed": seed, "T": len(x), "accuracy": accuracy, "curve": curve}


if __name__ == "__main__":
    main()
