"""All benchmarks that this machine can run, then the tables in README.md.

python -m benchmarks            on a GPU the time-step scaling, and always the CPU comparison
"""

from __future__ import annotations

import argparse

import torch

from benchmarks import cpu_neuron, tables, timestep_scaling


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.parse_args()
    if torch.cuda.is_available():
        timestep_scaling.main([])
    else:
        print("no GPU: the time-step scaling is left out")
    cpu_neuron.main([])
    tables.main([])


if __name__ == "__main__":
    main()
