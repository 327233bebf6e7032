"""Time and memory of one LIF layer, forward and backward, over the number of time steps.

    python -m benchmarks.timestep_scaling

The figure is Fig. 5 of "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion", for one
layer of 1,000,000 neurons. SpikingJelly is measured if it is installed. The roofline is the time in
which the machine copies the bytes that must move: x and grad_y read, y and grad_x written, x read
again.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import layers, plots, record, runner
from benchmarks.layers import COMPILED, DTYPES, LOOP, Inputs, LayerInput, LayerTruth
from benchmarks.neurons import COPY_BYTES
from benchmarks.runner import Contender, Timing, measure

STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class StepRow:
    T: int
    dtype: str

    @property
    def title(self) -> str:
        return f"T={self.T}, {self.dtype}"


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("timestep_scaling", __doc__)
    parser.add_argument("--T", type=int, nargs="+", help="time steps (1 2 4 ... 1024)")
    parser.add_argument("--N", type=int, help="neurons (1,000,000)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--eager-up-to", type=int, default=64, help="largest T of the eager loop")
    parser.add_argument("--compile-up-to", type=int, help="largest T of torch.compile (32)")
    args = runner.parse(parser, argv)
    args.T = args.T or ([2, 4] if args.quick else list(STEPS))
    args.N = args.N or (1000 if args.quick else 1_000_000)
    if args.compile_up_to is None:
        args.compile_up_to = 0 if args.quick else 32
    timing = Timing.of(args, COPY_BYTES)
    rows = [StepRow(T, dtype) for dtype in args.dtype for T in args.T]
    path = runner.run_rows(args, rows, partial(measure_steps, timing, args))
    plots.timestep_scaling(record.read(path), path.with_suffix(".png"))
    return path


def measure_steps(timing: Timing, args: argparse.Namespace, row: StepRow) -> dict[str, Any]:
    given = LayerInput((row.T, 1, args.N), DTYPES[row.dtype], torch.device(args.device))
    inputs, neuron = Inputs(given), layers.lif()
    truth = LayerTruth(neuron, inputs)
    contenders = [layers.ours(neuron, inputs), *layers.jelly_lif(inputs)]
    for name, up_to, make in (
        (LOOP, args.eager_up_to, partial(layers.eager_loop, neuron)),
        (COMPILED, args.compile_up_to, layers.compiled),
    ):
        reason = f"measured up to T = {up_to} only"
        contenders.append(make(inputs) if up_to >= row.T else Contender(name, unavailable=reason))
    about = {"T": row.T, "N": args.N, "dtype": row.dtype, "verified_neurons": truth.num_neurons}
    about |= {"input_bytes": inputs.num_bytes, "input_sets": len(inputs.sets)}
    num_bytes = inputs.bytes_to_move()
    return about | measure(contenders, truth.verify, timing, num_bytes, inputs.prepare)


if __name__ == "__main__":
    main()
