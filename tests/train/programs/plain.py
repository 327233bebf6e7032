"""The command `spikefuse` with a model without batch norm, whose gradients do not depend on how a
batch is divided. Each process writes its id to a file, pid-RANK."""

import os
import sys
from pathlib import Path

from torch import nn

from spikefuse import models
from spikefuse.train.cli import main


def plain(neuron, in_channels, num_classes, size):
    width = in_channels * size[0] * size[1]
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 64), neuron(), nn.Linear(64, num_classes))


if __name__ == "__main__":
    models.MODELS["plain"] = plain
    Path(f"pid-{os.environ.get('RANK', 0)}").write_text(str(os.getpid()))
    sys.exit(main())
