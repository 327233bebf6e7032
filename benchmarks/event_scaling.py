"""Weak scaling of a network on events, its neurons shared out over ranks.

    python -m benchmarks.event_scaling                      on 1, 2 and 4 GPUs
    python -m benchmarks.event_scaling --ranks 1 2 --quick --device cpu

The width of the layers stays, and each rank brings the same number of neurons: K ranks have K times
as many layers, as in Finkbeiner and Neftci's poster. The input is as wide and as active as a layer,
so that each rank brings as many weights and events, too. Efficiency is the time of one rank over
that of K. The most ranks also have a network of a million neurons. It starts torchrun for each
number of ranks; started by torchrun, over several nodes perhaps, it measures these ranks alone, and
writes a result of theirs. Before, a small network that is shared out is compared with the whole.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import plots, record
from benchmarks.event_networks import CLASSES, neuron
from benchmarks.runner import Contender, Settings, clock_for, measure
from spikefuse.distributed import NeuronShard, Replicated, shard_neurons
from spikefuse.distributed.neuron_sharding import bounds
from spikefuse.nn import EventLinear, Events, scale_to_rate

# The runs that are compared, and the one of so many neurons in all.
SCALING, LARGEST = "weak scaling", "the largest"
# On so many ranks: efficiency, and the least neurons and parameters for which it counts.
BAR_RANKS, BAR, BAR_NEURONS, BAR_PARAMETERS = 4, 0.75, 190_000, 180_000_000
# Sums over ranks add in another order; of the largest gradient.
ROUNDING = 1e-5

DEFAULTS = {
    "neurons": 47_500, "width": 9_500, "T": 100, "batch": 48, "rounds": 7, "largest": 1_000_000
}  # fmt: skip
QUICK = {"neurons": 200, "width": 100, "T": 10, "batch": 4, "rounds": 2, "largest": 500}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.event_scaling", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="on one machine")
    parser.add_argument("--neurons", type=int, help="of each rank (47,500)")
    parser.add_argument("--width", type=int, help="neurons of a layer (9,500)")
    parser.add_argument("--largest", type=int, help="neurons in all of one more run (1,000,000)")
    parser.add_argument("--rate", type=float, default=0.01, help="share of neurons that fire")
    parser.add_argument("--T", type=int, help="time steps (100)")
    parser.add_argument("--batch", type=int, help="samples (48)")
    parser.add_argument("--rounds", type=int, help="turns (7)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder for the result (benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="a trial: its result is kept apart")
    args = parser.parse_args(argv)
    for name, value in (QUICK if args.quick else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.neurons < args.width:
        parser.error("--neurons must be at least --width")
    if min(*args.ranks, args.width, args.T, args.batch, args.rounds) < 1:
        parser.error("--ranks, --width, --T, --batch and --rounds must be at least 1")
    return args


# One number of ranks, in the processes that torchrun started


def network(args: argparse.Namespace, events: Events, device: torch.device) -> nn.Sequential:
    """Each rank makes its own shares, layer by layer at the activity asked for."""
    layers: list[nn.Module] = []
    for _ in range(args.neurons // args.width * dist.get_world_size()):
        shard = NeuronShard(args.width, args.width, neuron(), device=device)
        scale_to_rate(shard.layer, events, args.rate)
        with torch.no_grad():
            events = shard(events)
        layers.append(shard)
    torch.manual_seed(0)
    return nn.Sequential(*layers, Replicated(EventLinear(args.width, CLASSES, device=device)))


def verify(device: torch.device, contender: Contender, result: None) -> None:
    """A small network that is shared out gives what the whole one gives, on every rank.

    Raises:
        AssertionError: it does not, on all ranks.
    """
    errors = differences(device)
    worst = torch.tensor(list(errors.values()), device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)  # no rank may stop alone
    for what, error in zip(errors, worst.tolist(), strict=True):
        assert error <= ROUNDING, f"{what} of a network shared out: {error:.3g} from the whole one"


def differences(device: torch.device) -> dict[str, float]:
    """Of this rank's outputs and gradients, from those of the whole network, relative to these."""
    torch.manual_seed(0)
    lists = "triton" if device.type == "cuda" else "numba"
    sizes = ((60, 70, neuron()), (70, 50, neuron()), (50, CLASSES, None))
    whole = nn.Sequential(*(EventLinear(i, o, n, impl=lists) for i, o, n in sizes)).to(device)
    events = Events.from_dense((torch.rand(20, 4, 60) < 0.2).float().to(device))
    scale_to_rate(whole, events, 0.2)
    shared = shard_neurons(copy.deepcopy(whole))
    outputs = []
    for net in (whole, shared):
        outputs.append(sf.Temporal(net)(events))
        outputs[-1].square().sum().backward()
    found = {"outputs": _apart(outputs[1].detach(), outputs[0].detach())}
    for i, (layer, shard) in enumerate(zip(whole, shared, strict=True)):
        first = bounds(layer.out_features) if isinstance(shard, NeuronShard) else None
        own = slice(None) if first is None else slice(*first[dist.get_rank() :][:2])
        for name in ("weight", "bias"):
            grad, expected = getattr(shard.layer, name).grad, getattr(layer, name).grad
            found[f"gradient of {name} {i}"] = _apart(grad, expected[..., own])
    return found


def _apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    drawn = torch.rand(args.T, args.batch, args.width) < args.rate
    events = Events.from_dense(drawn.float().to(device))
    labels = torch.randint(CLASSES, (args.batch,)).to(device)
    torch.manual_seed(1 + dist.get_rank())
    net = network(args, events, device)
    temporal = sf.Temporal(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.0, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(temporal(events).mean(0), labels).backward()
        optimizer.step()
        dist.barrier()

    contender = Contender("events, neurons shared out", step)
    settings = Settings(args.rounds, 0.0, 3)
    check = functools.partial(verify, device)
    found = measure([contender], [], check, clock_for(device), 0, settings)
    (result,) = found["contenders"]
    own = sum(p.numel() for shard in net[:-1] for p in shard.parameters())
    total = torch.tensor(own, device=device)
    dist.all_reduce(total)
    row = {
        "ranks": dist.get_world_size(),
        "layers": len(net) - 1,
        "neurons": args.width * (len(net) - 1),
        "parameters": int(total) + sum(p.numel() for p in net[-1].parameters()),
    } | found
    if result["status"] == "ok":
        row["samples_per_s"] = round(1e3 * args.batch / result["wall_ms"]["median"], 2)
    return row


def by_these(args: argparse.Namespace) -> Path | None:
    """Measure the ranks that torchrun started; the path of the result, in the one that writes."""
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        row = run(args, device)
        if dist.get_rank():
            return None
        settings = _settings(args)
        result = record.document(f"event_scaling_{row['ranks']}", device, args.quick, settings)
        result |= {"rows": [row], "bars": []}
        print(progress(row), flush=True)
        return record.write(record.folder(args.out, args.quick), result)
    finally:
        dist.destroy_process_group()


# All of them


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in (*DEFAULTS, "rate", "ranks")}


def started(args: argparse.Namespace, ranks: int, neurons: int) -> dict[str, Any]:
    """The row of so many ranks with so many neurons each, in processes of their own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(ranks), "-m", "benchmarks.event_scaling"]
    command += ["--device", args.device, "--neurons", str(neurons), *["--quick"] * args.quick]
    for name in ("width", "rate", "T", "batch", "rounds"):
        command += [f"--{name}", str(getattr(args, name))]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, "--out", folder], cwd=record.ROOT, check=False)
        paths = list(Path(folder).glob("*.json"))
        if done.returncode or len(paths) != 1:
            # What others measured stays.
            return {"ranks": ranks, "status": "failed", "reason": f"exit code {done.returncode}"}
        (row,) = record.read(paths[0])["rows"]
    return dict(row)


def milliseconds(row: dict[str, Any]) -> float | None:
    """Of a step, where one was measured."""
    (contender,) = row.get("contenders", [{}])
    return contender["wall_ms"]["median"] if "wall_ms" in contender else None


def compare(rows: list[dict[str, Any]]) -> None:
    """Add the efficiency to the rows of weak scaling, if one rank is among them."""
    times = {r["ranks"]: milliseconds(r) for r in rows if r["what"] == SCALING}
    one = times.get(1)
    for row in rows:
        time = milliseconds(row)
        if row["what"] == SCALING and one and time:
            row["efficiency"] = round(one / time, 4)


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The project's own bars; where nothing was measured, one is missed."""
    scaling = {r["ranks"]: r for r in rows if r["what"] == SCALING}
    found = []
    if BAR_RANKS in scaling:
        row, on = scaling[BAR_RANKS], f"{BAR_RANKS} ranks"
        found = [
            record.bar(f"{on}: time of one over theirs", row.get("efficiency"), BAR),
            record.bar(f"{on}: neurons", row.get("neurons"), BAR_NEURONS),
            record.bar(f"{on}: parameters", row.get("parameters"), BAR_PARAMETERS),
        ]
    for row in rows:
        if row["what"] == LARGEST:
            neurons = row.get("neurons") if milliseconds(row) else None
            found.append(record.bar(f"{LARGEST} run: neurons", neurons, DEFAULTS["largest"]))
    return found


def progress(row: dict[str, Any]) -> str:
    said = f"{row['ranks']} ranks"
    if "neurons" in row:
        said += f", {row['neurons']:,} neurons, {row['parameters']:,} parameters"
    time = milliseconds(row)
    if time is None:
        (about,) = row.get("contenders", [row])
        return f"{said}: {about['status']}, {about['reason']}"
    return f"{said}: {time:.2f} ms, {row['samples_per_s']} samples/s"


def main(argv: list[str] | None = None) -> Path | None:
    args = arguments(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return by_these(args)
    rows = []
    for ranks in sorted(set(args.ranks)):
        rows.append({"what": SCALING} | started(args, ranks, args.neurons))
    most = max(args.ranks)
    layers = math.ceil(args.largest / (most * args.width))
    if args.largest and layers * args.width > args.neurons:
        rows.append({"what": LARGEST} | started(args, most, layers * args.width))
    compare(rows)
    device = torch.device(args.device)
    result = record.document("event_scaling", device, args.quick, _settings(args))
    judged = device.type == "cuda" and not args.quick
    result |= {"rows": rows, "bars": bars(rows) if judged else []}
    for row in rows:
        told = f", efficiency {row['efficiency']:.3f}" if "efficiency" in row else ""
        print(f"{row['what']}, {progress(row)}{told}", flush=True)
    record.print_bars(result["bars"])
    path = record.write(record.folder(args.out, args.quick), result)
    drawn = plots.weak_scaling(result, path.with_suffix(".png"))
    print(f"wrote {path}, {drawn or 'no plot'}")
    return path


if __name__ == "__main__":
    main()
