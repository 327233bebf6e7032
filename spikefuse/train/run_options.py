"""The options of a run that do not determine its result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spikefuse.data.files import ENVIRONMENT
from spikefuse.train.fields import AT_LEAST_ONE, check_fields, option

DEVICES = ("auto", "cpu", "cuda")
SEARCHED = f"${ENVIRONMENT}, else see the end of spikefuse train --help"


@dataclass(frozen=True)
class RunOptions:
    """Where and how to run; the result does not depend on these options.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    out: Path | None = option(None, "new folder of the run", shown="runs/DATASET-MODEL-N")
    time_ranks: int = option(1, "processes that share a sequence, under torchrun", AT_LEAST_ONE)
    data_ranks: int | None = option(
        None, "processes that share a batch", AT_LEAST_ONE, "all processes / time-ranks"
    )
    time_chunks: int | None = option(
        None,
        "microbatches in which states are sent from one time rank to the next",
        AT_LEAST_ONE,
        "1 on GPUs, which do not wait for states; 4 on CPUs",
    )
    device: str = option("auto", "device; auto is CUDA if available", DEVICES)
    logger: str | None = option(
        None,
        "Lightning logger in addition to CSV and TensorBoard, such as wandb or mlflow, or "
        "module:function for one of your own",
        shown="none",
    )
    data_dir: Path | None = option(None, "folder of the datasets", shown=SEARCHED)
    download: bool = option(
        False,
        "download missing files of mnist, fashion_mnist, cifar10 and cifar100, verifying checksums",
    )

    def __post_init__(self) -> None:
        check_fields(self)
