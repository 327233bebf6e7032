"""Whole training steps of perceptrons on events, against dense ones: over activity and size.

    python -m benchmarks.events                 all cases that this machine is for
    python -m benchmarks.events --cases shd     one of them

The networks, neurons and optimizer are those of Finkbeiner and Neftci, "Drastically Improved
SNN-Training Throughput on the IPU by Utilizing Activation Sparsity". A step is forward, backward
and update. Activity is natural: random weights, scaled so that each layer fires at the rate asked
for on this very input, and the learning rate so small that it stays. All contenders have the same
weights, and the same input each in the form that it takes.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import cpu_neuron, plots, record
from benchmarks.runner import Contender, Settings, clock_for, measure
from spikefuse.models import event_mlp, mlp, split_widths
from spikefuse.nn import Events, RowAdam, scale_to_rate

EVENTS, LAZY = "events", "events, RowAdam"
DENSE, LOOP = "dense, fused over time", "dense, compiled per step"
DECAY, THRESHOLD, WIDTH, CUTOFF = 0.95, 1.0, 10.0, -0.1
CLASSES, LEARNING_RATE = 20, 1e-7
# A neuron whose potential is as near to its threshold as rounding fires in one and not in another,
# and from then on its sample goes another way. So most samples have to agree to rounding, and of
# the gradients, which are sums over all samples, the greater part.
AGREEING, ROUNDING, GRADIENTS = 0.6, 1e-3, 0.3


@dataclass(frozen=True)
class Case:
    """A network and its input.

    Args:
        num_steps, batch, inputs: of the input.
        input_rate: share of the inputs that spike in a step.
        hidden: neurons of each hidden layer.
        rates: of the hidden layers, each measured.
        bars: how many times faster than dense on a CPU, by rate.
        loop_bar: how many times faster our best is than the compiled loop on a GPU.
    """

    num_steps: int
    batch: int
    inputs: int
    input_rate: float
    hidden: tuple[int, ...]
    rates: tuple[float, ...]
    bars: tuple[tuple[float, float], ...] = ()
    loop_bar: float | None = None


SWEEP = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
# Of 700 inputs at most 48 spike in a step of SHD, which is taken for all steps here.
SHD_RATE = 48 / 700
CASES = {
    "shd": Case(100, 48, 700, SHD_RATE, split_widths(3), SWEEP, ((0.02, 6.0), (0.005, 12.0)), 30.0),
    "shd, inputs alike": Case(100, 48, 700, 0.02, split_widths(3), (0.005, 0.02)),
    "nmnist": Case(100, 48, 2312, 32 / 2312, split_widths(3), (0.005, 0.02)),
    "dvs gesture": Case(50, 48, 4608, 0.01, split_widths(3), (0.005, 0.02)),
    "23k": Case(10, 24, 700, SHD_RATE, split_widths(5, 16), (0.01,), ((0.01, 8.0),)),
    "47k": Case(10, 24, 700, SHD_RATE, split_widths(5, 32), (0.01,), ((0.01, 8.0),)),
}


def neuron() -> sf.LIF:
    surrogate = sf.surrogate.FastSigmoid(WIDTH, cutoff=CUTOFF)
    return sf.LIF(DECAY, THRESHOLD, detach_reset=True, surrogate=surrogate)


class Step(nn.Module):
    """One step in time of the whole dense network: `(x, potentials)` to `(y, potentials)`."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, s: Tensor, *potentials: Tensor) -> tuple[Tensor, ...]:
        *hidden, last = self.linears
        after = []
        for linear, v in zip(hidden, potentials, strict=True):
            h = DECAY * v + linear(s)
            u = h - THRESHOLD
            smooth = torch.where(u >= CUTOFF, u / (1 + WIDTH * u.abs()), 0.0)
            s = (u >= 0).to(h.dtype) + smooth - smooth.detach()
            after.append(torch.where(u >= 0, 0.0, h))
        return last(s), *after


class Work:
    """The contenders of a case at one rate, on a device."""

    def __init__(self, case: Case, rate: float, device: torch.device) -> None:
        self.case, self.device = case, device
        torch.manual_seed(0)
        drawn = torch.rand(case.num_steps, case.batch, case.inputs)
        self.x = (drawn < case.input_rate).float().to(device)
        self.events = Events.from_dense(self.x)
        self.labels = torch.randint(CLASSES, (case.batch,), device=device)
        net = event_mlp(neuron, case.inputs, CLASSES, (1, 1), case.hidden).to(device)
        self.rates = scale_to_rate(net, self.events, rate)
        self.expected: list[Tensor] | None = None
        self.net = net

    def dense(self) -> nn.Sequential:
        net = mlp(neuron, self.case.inputs, CLASSES, (1, 1), self.case.hidden, norm=False)
        linears = [m for m in net if isinstance(m, nn.Linear)]
        with torch.no_grad():
            for linear, layer in zip(linears, self.net, strict=True):
                linear.weight.copy_(layer.weight.t())
                linear.bias.copy_(layer.bias)
        return net.to(self.device)

    def step(
        self,
        call: Callable[[], Tensor],
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> tuple[Tensor, list[Tensor]]:
        optimizer.zero_grad()
        logits = call().mean(0)
        F.cross_entropy(logits, self.labels).backward()
        optimizer.step()
        return logits, [p.grad for p in parameters if p.grad is not None]

    def contender(
        self, name: str, net: nn.Module, call: Callable[[], Tensor], make_optimizer: Any
    ) -> Contender:
        parameters = list(net.parameters())
        optimizer = make_optimizer(parameters, lr=LEARNING_RATE)
        return Contender(name, functools.partial(self.step, call, parameters, optimizer))

    def contenders(self, names: Sequence[str]) -> list[Contender]:
        fused = functools.partial(torch.optim.Adam, fused=True)
        found = []
        for name in names:
            if name == DENSE:
                dense = self.dense()
                temporal = sf.Temporal(dense, sf.memory.SaveAll())  # the fastest
                found.append(self.contender(name, dense, lambda t=temporal: t(self.x), fused))
            elif name == LOOP:
                step = Step([m for m in self.dense() if isinstance(m, nn.Linear)])
                call = functools.partial(self.loop, torch.compile(step))
                found.append(self.contender(name, step, call, fused))
            else:
                case, lazy = self.case, name == LAZY
                net = event_mlp(
                    neuron, case.inputs, CLASSES, (1, 1), case.hidden, sparse_grad=lazy
                ).to(self.device)
                net.load_state_dict(self.net.state_dict())
                temporal = sf.Temporal(net)
                make = RowAdam if lazy else fused
                found.append(self.contender(name, net, lambda t=temporal: t(self.events), make))
        return found

    def loop(self, step: Callable[..., tuple[Tensor, ...]]) -> Tensor:
        rows = self.case.batch
        potentials = [torch.zeros(rows, n, device=self.device) for n in self.case.hidden]
        outputs = []
        for x in self.x:
            y, *potentials = step(x, *potentials)
            outputs.append(y)
        return torch.stack(outputs)

    def verify(self, contender: Contender, result: tuple[Tensor, list[Tensor]]) -> None:
        """Logits and gradients against those of the first contender, which is the dense network."""
        logits, grads = result
        on_events = contender.name in (EVENTS, LAZY)
        dense = [g.to_dense() if g.is_sparse else g for g in grads]
        found = [logits.detach(), *(g.t() if on_events and g.ndim == 2 else g for g in dense)]
        if self.expected is None:
            self.expected = [x.clone() for x in found]
        logits, expected = found[0], self.expected[0]
        near = (logits - expected).abs().amax(1) <= ROUNDING * expected.abs().max()
        share = near.float().mean().item()
        assert share >= AGREEING, f"{share:.0%} of the samples agree"
        for i, (a, b) in enumerate(zip(found[1:], self.expected[1:], strict=True)):
            error = float((a - b).norm() / b.norm().clamp(min=1e-30))
            assert error <= GRADIENTS, f"gradient {i} differs by {error:.3g} of its norm"


def measure_one(
    name: str, rate: float, names: Sequence[str], device: torch.device, rounds: int
) -> dict[str, Any]:
    case = CASES[name]
    work = Work(case, rate, device)
    found = measure(
        work.contenders(names), [], work.verify, clock_for(device), 0, Settings(rounds, 0.0, 3)
    )
    times = {c["name"]: c["wall_ms"]["median"] for c in found["contenders"] if "wall_ms" in c}
    row = {
        "case": name,
        "T": case.num_steps,
        "batch": case.batch,
        "neurons": sum(case.hidden),
        "layers": len(case.hidden),
        "parameters": sum(p.numel() for p in work.net.parameters()),
        "rate": rate,
        "input_rate": round(work.events.rate, 6),
        "layer_rates": [round(r, 6) for r in work.rates.values()],
        "samples_per_s": {n: round(1e3 * case.batch / t, 1) for n, t in times.items()},
        "times_dense": {n: round(times[DENSE] / t, 3) for n, t in times.items()},
    }
    return row | found


def bars(rows: list[dict[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """Against the best of ours, at the rates that the bars are for."""
    found = []
    for row in rows:
        case, ratios = CASES[row["case"]], row["times_dense"]
        where = f"{row['case']}, activity {row['rate']:.1%}"
        best = max([ratios[n] for n in (EVENTS, LAZY) if n in ratios], default=None)
        for rate, limit in case.bars:
            if device.type == "cpu" and rate == row["rate"]:
                what = f"{where}: times faster than the dense network"
                found.append(record.bar(what, best, limit))
        if device.type == "cuda" and case.loop_bar is not None and LOOP in ratios:
            ours = max(best or 0.0, ratios[DENSE]) / ratios[LOOP]
            what = f"{where}: times faster, our best, than the compiled loop over steps"
            found.append(record.bar(what, ours, case.loop_bar))
    return found


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.events", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--rates", nargs="+", type=float, help="in place of those of the cases")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--loop", action="store_true", help="the compiled loop over steps too")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.add_argument("--out", type=Path, help="folder for the result (benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="a trial: its result is kept apart")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> Path:
    args = arguments(argv)
    device = torch.device(args.device)
    reused = device.type == "cpu" and cpu_neuron.reuse_memory()
    settings = {"rounds": args.rounds, "memory": "reused" if reused else "as it is"}
    result = record.document("events", device, args.quick, settings)
    print(f"load average {result['machine']['load_average']} before")
    names = [DENSE, EVENTS, LAZY] + [LOOP] * args.loop
    result["rows"] = []
    for name in args.cases:
        for rate in args.rates or CASES[name].rates:
            row = measure_one(name, rate, names, device, args.rounds)
            result["rows"].append(row)
            for c in row["contenders"]:
                told = c["status"] if "reason" not in c else f"{c['status']}: {c['reason']}"
                if "wall_ms" in c:
                    ratio = row["times_dense"][c["name"]]
                    told = f"{c['wall_ms']['median']:.2f} ms, {ratio:.2f} times dense"
                print(f"{name}, {rate:.1%}, {c['name']}: {told}", flush=True)
    result["bars"] = bars(result["rows"], device)
    record.print_bars(result["bars"])
    path = record.write(record.folder(args.out, args.quick), result)
    plots.crossover(result, path.with_suffix(".png"))
    print(f"wrote {path}")
    return path


if __name__ == "__main__":
    main()
