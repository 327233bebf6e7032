"""All benchmarks that one process can run on this machine, then the tables in README.md.

python -m benchmarks        on a GPU its own, then events, the first calls and the CPU comparison

Not those of several GPUs, which benchmarks.several_gpus has; nor those that train:
benchmarks.training, benchmarks.convergence, benchmarks.event_accuracy and benchmarks.reproduce.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks import (
    block,
    bptt_figures,
    cpu_neuron,
    events,
    first_call,
    networks,
    neurons,
    tables,
    timestep_scaling,
)


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.parse_args()
    if torch.cuda.is_available():
        timestep_scaling.main([])
        neurons.main([])
        block.main([])
        networks.main([])
        bptt_figures.main([])
    else:
        print("no GPU: the time-step scaling, the rooflines, networks and figures are left out")
    events.main(["--loop", "--streaming"] if torch.cuda.is_available() else [])
    first_call.main([])
    cpu_neuron.main([])
    tables.main([])


if __name__ == "__main__":
    main()
