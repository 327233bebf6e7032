"""Time shared by several GPUs: one layer of LIF neurons, and training steps of Spiking-ResNet18.

    torchrun --nproc_per_node 4 -m benchmarks.time_sharding
    torchrun --nproc_per_node 4 -m benchmarks.time_sharding --rounds 5       in fewer minutes

The layer: a million neurons, float32, forward and backward, T from 32 to 4096 on 1, 2, 4 ... GPUs
and in several numbers of chunks, verified against one GPU before it is timed. The network, fused:
128 x 128 pixels, T = 128, batch 16, bfloat16, channels-last, with exact and with per-shard
statistics of its batch norms; data x time for the same work; and the largest T, doubled until one
GPU has not enough memory. Both run eagerly and as replays of a CUDA graph; a network's are compared
with its eager steps. Bars are for replays, against one GPU's, and for the memory of eager steps.
Each is predicted by the paper's Eq. 5 and by `spikefuse.distributed.plan`. A step ends when all
GPUs have ended it. Where fewer ranks share the time than there are GPUs, the others do the same at
the same time. The result is written after each part. On CPUs over Gloo.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import spikefuse as sf
from benchmarks import lif, plots, record, time_networks
from benchmarks.ranks import STEPS_BEFORE_GRAPH, forecast, hand_on, predict, timed
from benchmarks.runner import first_line
from benchmarks.steps import EAGERLY, GRAPH, WAYS, graphed
from spikefuse.distributed import Plan, make_mesh, plan, shard_time, steps_of
from spikefuse.train.processes import Processes

CHUNKS, NETWORK_CHUNKS = (1, 2, 4, 8, 16), (1, 2, 4)
# Time steps, and the speed-up on so many GPUs.
LAYER_BARS = {(1024, 2): 1.75, (1024, 4): 2.6, (4096, 2): 1.9, (4096, 4): 3.4}
NETWORK_BARS = {("shard", 2): 1.8, ("shard", 4): 3.2, ("exact", 2): 1.6, ("exact", 4): 2.4}
MEMORY_BAR, PREDICTION_BAR = (4, 0.30), 0.15
# Elements up to which a layer is verified against one GPU.
VERIFIED = 1 << 29


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.time_sharding", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--T", type=int, nargs="+", help="of the layer (32 64 ... 4096)")
    parser.add_argument("--N", type=int, help="neurons of the layer (1,000,000)")
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=CHUNKS, help="of the layer (1 2 4 8 16)"
    )
    parser.add_argument(
        "--network-chunks",
        type=int,
        nargs="+",
        default=NETWORK_CHUNKS,
        help="of the network (1 2 4)",
    )
    parser.add_argument(
        "--ways",
        choices=WAYS,
        nargs="+",
        metavar="WAY",
        help=f"of the network: {', '.join(WAYS)} (both; on CPUs the first)",
    )
    parser.add_argument(
        "--forecast",
        type=int,
        nargs="*",
        metavar="K",
        help="numbers of GPUs that are only predicted (8, where there are fewer)",
    )
    parser.add_argument("--rounds", type=int, help="(11)")
    parser.add_argument("--only", choices=("layer", "network", "long"), nargs="+", help="parts")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="folder for the result (benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="a trial: small, few rounds")
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.T = args.T or ([8] if args.quick else [32 << i for i in range(8)])
    args.N = args.N or (1000 if args.quick else 1_000_000)
    if args.forecast is None:
        args.forecast = [] if args.quick or Processes.started().count >= 8 else [8]
    args.rounds = args.rounds or (2 if args.quick else 11)
    args.only = args.only or (["layer", "network"] if args.quick else ["layer", "network", "long"])
    args.ways = args.ways or (WAYS if args.device == "cuda" else [EAGERLY])
    if min(*args.T, args.N, *args.chunks, *args.network_chunks, args.rounds) < 1:
        parser.error("--T, --N, --chunks, --network-chunks and --rounds must be at least 1")
    if GRAPH in args.ways and args.device != "cuda":
        parser.error(f"--ways {GRAPH!r} needs CUDA GPUs")
    if Processes.started().count < 2:
        parser.error("start it with torchrun --nproc_per_node N -m benchmarks.time_sharding")
    return args


def main(argv: list[str] | None = None) -> Path | None:
    """The path of the result, in the process that writes it."""
    args, processes = arguments(argv), Processes.started()
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", processes.local_rank)
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        # It would query events while a graph is recorded.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    rows: list[dict[str, Any]] = []
    path = None
    with processes.connected(device):
        for _ in measured(rows, device, processes, args):
            path = save(rows, device, processes, args)
    if path is not None:
        record.print_bars(record.read(path)["bars"])
        drawn = plots.time_sharding(record.read(path), path.with_suffix(".png"))
        print(f"wrote {path}, {drawn or 'no plot'}")
    return path


def measured(
    rows: list[dict[str, Any]],
    device: torch.device,
    processes: Processes,
    args: argparse.Namespace,
) -> Iterator[None]:
    """Add rows; it stops where a part of them is complete."""
    # Every process makes all meshes: to make one is a thing that they do together.
    meshes = {k: make_mesh(time=k, device=device.type) for k in _divisors(processes.count)}
    nets = layers(meshes) if "layer" in args.only else {}
    for way in args.ways:  # all eagerly, in case that something can't be recorded
        for T in args.T if nets else ():
            made = layer_rows(T, meshes, nets, device, args, way)
            rows += made
            report(made, processes)
        if nets and args.forecast and not args.quick and way == args.ways[-1]:
            rows += longer_layer(max(args.T), meshes[processes.count], device, args, way)
        if nets:
            yield
        if "network" in args.only:
            for row in time_networks.rows_of(meshes, device, args, way):
                rows.append(row)
                report([row], processes)
            yield
    if "long" in args.only:
        rows.append(time_networks.longest(meshes[processes.count], device))
        report(rows[-1:], processes)
        yield
    if "network" in args.only:
        time_networks.predicted(rows, meshes[processes.count], device, args)
        yield
        if args.forecast and not args.quick:
            rows += time_networks.forecasts(meshes[processes.count], device, args, args.ways[-1])
            yield


def save(
    rows: list[dict[str, Any]],
    device: torch.device,
    processes: Processes,
    args: argparse.Namespace,
) -> Path | None:
    if not processes.main:
        return None
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "quick", "device")}
    result = record.document("time_sharding", device, args.quick,
                             {**settings, "processes": processes.count})  # fmt: skip
    judged = device.type == "cuda" and not args.quick
    result |= {"rows": rows, "bars": bars(rows) if judged else []}
    return record.write(folder(args.out, args.quick), result)


# One for all parts.
folder = functools.cache(record.folder)


def report(rows: list[dict[str, Any]], processes: Processes) -> None:
    if processes.main:
        print("\n".join(map(progress, rows)), flush=True)


def _divisors(count: int) -> list[int]:
    return [k for k in range(1, count + 1) if count % k == 0]


# One layer


def layers(meshes: dict[int, DeviceMesh]) -> dict[int, sf.Temporal]:
    """One for each number of GPUs; connections take time and memory."""
    return {
        k: sf.Temporal(lif.neuron()) if k == 1 else shard_time(sf.Temporal(lif.neuron()), m["time"])
        for k, m in meshes.items()
    }


def layer_rows(
    T: int,
    meshes: dict[int, DeviceMesh],
    nets: dict[int, sf.Temporal],
    device: torch.device,
    args: argparse.Namespace,
    way: str,
) -> list[dict[str, Any]]:
    """A row for each number of GPUs, with its best number of chunks."""
    batch = max(1, round(args.N**0.5))
    shape = (T, batch, args.N // batch)
    one, rows = 0.0, []
    for k, mesh in meshes.items():
        if k > T:
            continue
        about = {"what": "layer", "way": way, "T": T, "N": args.N, "time": k, "data": 1}
        step = LayerStep(nets[k], shape, mesh["time"], device)
        try:
            found = by_chunks(step, args.chunks if k > 1 else (1,), args.rounds, way)
        except Exception as error:
            if way == EAGERLY:
                raise
            rows.append({**about, "status": "unavailable", "reason": first_line(error)})
            continue
        best = min(found, key=lambda chunks: found[chunks]["median"])
        row = {**about, "status": "ok", "chunks": best, "speculate": True, "ms": found[best]}
        row["by_chunks"] = {str(chunks): ms["median"] for chunks, ms in found.items()}
        one = found[best]["median"] if k == 1 else one
        rows.append(row | ({"speedup": one / found[best]["median"]} if one else {}))
    step = None
    if mesh.size() <= T and all(row["status"] == "ok" for row in rows):
        made = layer_plan(shape, mesh, device, way)
        predict(rows, made)
        rows += forecast({"what": "layer", "way": way, "T": T, "N": args.N}, made, args.forecast)
    return rows


def longer_layer(
    T: int, mesh: DeviceMesh, device: torch.device, args: argparse.Namespace, way: str
) -> list[dict[str, Any]]:
    """Forecasts for twice the T, of which one GPU has no room for a step."""
    batch = max(1, round(args.N**0.5))
    made = layer_plan((2 * T, batch, args.N // batch), mesh, device, way)
    return forecast({"what": "layer", "way": way, "T": 2 * T, "N": args.N}, made, args.forecast)


def layer_plan(shape: tuple[int, ...], mesh: DeviceMesh, device: torch.device, way: str) -> Plan:
    x = torch.rand(shape, device=device, requires_grad=True)
    try:
        return plan(sf.Temporal(lif.neuron()), x, mesh, recorded=way == GRAPH)
    finally:
        gc.collect()  # of recordings their memory


def by_chunks(
    step: LayerStep, counts: Sequence[int], rounds: int, way: str
) -> dict[int, dict[str, Any]]:
    """Times of the step by its number of chunks, verified unless it is too large.

    Raises:
        AssertionError: it is wrong.
    """
    found, shape = {}, step.shape
    for chunks in counts:
        hand_on(step.net, chunks)
        run: Callable[[], Sequence[Tensor]] = step
        if way == GRAPH:
            run, _ = graphed(step, STEPS_BEFORE_GRAPH)
        if math.prod(shape) <= VERIFIED:
            step.verify(run)
        found[chunks] = timed(run, step.device, rounds)
        run = step
        gc.collect()  # of a graph its memory, before the next one
    return found


class LayerStep:
    """Forward and backward of a rank's steps, for given gradients."""

    def __init__(
        self, net: nn.Module, shape: tuple[int, ...], axis: DeviceMesh, device: torch.device
    ) -> None:
        self.net, self.shape, self.device, self.seed = net, shape, device, shape[0]
        self.mine = steps_of(shape[0], axis.get_local_rank(), axis.size())
        self.x = self.drawn(0, self.mine).requires_grad_()
        self.grad = self.drawn(1, self.mine)

    def drawn(self, what: int, steps: slice) -> Tensor:
        """Uniform values, each step from a seed of its own: no rank draws all of them."""
        made = []
        for t in range(self.shape[0])[steps]:
            generator = torch.Generator(self.device).manual_seed((self.seed * 2 + what) << 20 | t)
            made.append(torch.rand(self.shape[1:], generator=generator, device=self.device))
        return torch.stack(made)

    def __call__(self) -> list[Tensor]:
        """Spikes, and the gradient of x."""
        self.x.grad = None
        y = self.net(self.x)
        y.backward(self.grad)
        assert self.x.grad is not None
        return [y.detach(), self.x.grad]

    def verify(self, run: Callable[[], Sequence[Tensor]]) -> None:
        """What `run` gives for this rank's steps is what one GPU with all steps does.

        Raises:
            AssertionError: it is not.
        """
        everything = slice(0, self.shape[0])
        x = self.drawn(0, everything).requires_grad_()
        expected = lif.neuron()(x)
        expected.backward(self.drawn(1, everything))
        for tensor in run():
            tensor.fill_(torch.nan)  # which a replay has to overwrite
        y, grad = run()
        assert torch.equal(y, expected[self.mine]), "spikes differ from one GPU's"
        assert x.grad is not None
        torch.testing.assert_close(grad, x.grad[self.mine], rtol=1e-5, atol=1e-6)


def progress(row: dict[str, Any]) -> str:
    about = ("what", "way", "T", "time", "data", "statistics", "chunks")
    said = ", ".join(f"{k} {row[k]}" for k in about if k in row)
    if "ms" in row:
        said += f": {row['ms']['median']:.3f} ms, {row.get('speedup', 0):.2f} times as fast as one"
    return said + "".join(f", {k} {row[k]}" for k in ("fits_one", "fits", "reason") if k in row)


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The project's own bars; where nothing was measured, one is missed. Those of speed are for
    replays. That of memory is for eager steps, whose memory is known exactly."""
    rows = [r for r in rows if r.get("status") != "not measured"]
    layers = {(r["T"], r["time"]): r for r in rows if r["what"] == "layer" and r["way"] == GRAPH}
    alone = [r for r in rows if r["what"] == "network" and r["data"] == 1]
    nets = {(r["way"], r["statistics"], r["time"]): r for r in alone}
    most = max([r.get("time", 1) for r in rows], default=1)
    found = [
        record.bar(f"layer, {GRAPH}, T={T}, {k} GPUs: speed-up",
                   layers.get((T, k), {}).get("speedup"), bar)
        for (T, k), bar in LAYER_BARS.items() if k <= most
    ]  # fmt: skip
    found += [
        record.bar(f"network, {GRAPH}, {statistics} statistics, {k} GPUs: speed-up",
                   nets.get((GRAPH, statistics, k), {}).get("speedup"), bar)
        for (statistics, k), bar in NETWORK_BARS.items() if k <= most
    ]  # fmt: skip
    k, limit = MEMORY_BAR
    if k <= most:
        memory = nets.get((EAGERLY, "shard", k), {}).get("memory_of_one")
        found.append(record.bar(f"network, {k} GPUs: memory of one's", memory, limit, False))
    for way in (GRAPH, EAGERLY):
        errors = [
            abs(r["predicted"] / r["speedup"] - 1)
            for r in rows
            if r.get("predicted") and r.get("speedup") and r["time"] > 1 and r["way"] == way
        ]
        worst, what = max(errors, default=None), f"{way}: speed-up predicted: largest error"
        if worst is not None or way == GRAPH:
            found.append(record.bar(what, worst, PREDICTION_BAR, False))
    return found


if __name__ == "__main__":
    main()
