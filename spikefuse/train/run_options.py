"""The options of a run that do not determine its result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spikefuse.train.fields import AT_LEAST_ONE, check_fields, option

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class RunOptions:
    """Where and how to run; the result does not depend on these options.

    Args:
        out: new folder of the run; by default runs/DATASET-MODEL-N.
        time_ranks: processes that share a sequence, under torchrun.
        data_ranks: processes that share a batch; by default all processes / time-ranks.
        time_chunks: microbatches in which states are sent from one time rank to the next; by
            default 1 on GPUs, which do not wait for states; 4 on CPUs.
        device: auto is CUDA if available.
        logger: Lightning logger in addition to CSV and TensorBoard, such as wandb or mlflow, or
            module:function for one of your own; by default none.
        data_dir: folder of the datasets; by default $SPIKEFUSE_DATA, else see the end of spikefuse
            train --help.
        download: download missing files of mnist, fashion_mnist, cifar10 and cifar100, verifying
            checksums.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    out: Path | None = option(None)
    time_ranks: int = option(1, AT_LEAST_ONE)
    data_ranks: int | None = option(None, AT_LEAST_ONE)
    time_chunks: int | None = option(None, AT_LEAST_ONE)
    device: str = option("auto", DEVICES)
    logger: str | None = option(None)
    data_dir: Path | None = option(None)
    download: bool = option(False)

    def __post_init__(self) -> None:
        check_fields(self)
