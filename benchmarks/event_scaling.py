"""Weak scaling of a network on events, its neurons shared out over ranks.

    torchrun --nproc_per_node K -m benchmarks.event_scaling

The width of the layers stays, and each rank brings the same number of neurons: K ranks have K times
as many layers, as in Finkbeiner and Neftci's poster. Every run writes its own result; efficiency is
the time of one rank over that of K.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import spikefuse as sf
from benchmarks import record
from benchmarks.event_networks import CLASSES, neuron
from benchmarks.runner import Contender, Settings, clock_for, measure
from spikefuse.distributed import NeuronShard, Replicated
from spikefuse.nn import EventLinear, Events, scale_to_rate

INPUTS, INPUT_RATE = 700, 48 / 700


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.event_scaling", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--neurons", type=int, default=47_500, help="of each rank")
    parser.add_argument("--width", type=int, default=3_800, help="neurons of a layer")
    parser.add_argument("--rate", type=float, default=0.01, help="share of neurons that fire")
    parser.add_argument("--T", type=int, default=100, help="time steps")
    parser.add_argument("--batch", type=int, default=48, help="samples")
    parser.add_argument("--rounds", type=int, default=7, help="turns")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder for the result (benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="a trial: its result is kept apart")
    args = parser.parse_args(argv)
    if args.neurons < args.width:
        parser.error("--neurons must be at least --width")
    return args


def network(args: argparse.Namespace, events: Events, device: torch.device) -> nn.Sequential:
    """Each rank makes its own shares, layer by layer at the activity asked for."""
    layers: list[nn.Module] = []
    width = INPUTS
    for _ in range(args.neurons * dist.get_world_size() // args.width):
        shard = NeuronShard(width, args.width, neuron(), device=device)
        scale_to_rate(shard.layer, events, args.rate)
        with torch.no_grad():
            events = shard(events)
        layers.append(shard)
        width = args.width
    torch.manual_seed(0)
    return nn.Sequential(*layers, Replicated(EventLinear(width, CLASSES, device=device)))


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    drawn = torch.rand(args.T, args.batch, INPUTS) < INPUT_RATE
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
    found = measure([contender], [], lambda c, result: None, clock_for(device), 0, settings)
    (result,) = found["contenders"]
    own = sum(p.numel() for shard in net[:-1] for p in shard.parameters())
    total = torch.tensor(float(own), device=device)
    dist.all_reduce(total)
    return {
        "ranks": dist.get_world_size(),
        "layers": len(net) - 1,
        "neurons": args.width * (len(net) - 1),
        "parameters": int(total) + sum(p.numel() for p in net[-1].parameters()),
        "samples_per_s": round(1e3 * args.batch / result["wall_ms"]["median"], 2),
    } | found


def main(argv: list[str] | None = None) -> Path | None:
    args = arguments(argv)
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        row = run(args, device)
        if dist.get_rank():
            return None
        names = ("neurons", "width", "rate", "T", "batch", "rounds")
        settings = {name: getattr(args, name) for name in names}
        result = record.document(f"event_scaling_{row['ranks']}", device, args.quick, settings)
        result |= {"rows": [row], "bars": []}
        print(f"{row['ranks']} ranks, {row['neurons']:,} neurons: {row['samples_per_s']} samples/s")
        path = record.write(record.folder(args.out, args.quick), result)
        print(f"wrote {path}")
        return path
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
