"""How many processes share a batch and a sequence, and what they cannot do together."""

from __future__ import annotations

from spikefuse.train.config import ConfigError, TrainConfig
from spikefuse.train.processes import Processes


def check_layout(
    config: TrainConfig,
    time_ranks: int,
    data_ranks: int | None,
    time_chunks: int | None,
    processes: Processes,
) -> None:
    """How many processes share what."""
    if min(n for n in (time_ranks, data_ranks, time_chunks) if n is not None) < 1:
        raise ConfigError("time_ranks, data_ranks and time_chunks must be at least 1")
    count, data = processes.count, data_ranks
    wanted = time_ranks * (count // time_ranks if data is None else data)
    if wanted != count:
        raise ConfigError(
            f"time_ranks {time_ranks} and data_ranks {data or 'as many as are left'} need "
            f"other than {count} processes: start torchrun --nproc_per_node with their product"
        )
    if config.optimizer == "row_adam" and processes.count > 1:
        raise ConfigError(
            "optimizer is row_adam, whose gradients of a few rows processes can't average: choose "
            "adam, or a single process"
        )
    if processes.time == 1:
        return
    if config.num_steps < processes.time:
        raise ConfigError(
            f"num_steps is {config.num_steps}: expected at least time_ranks, {processes.time}"
        )
    for name in ("tbptt", "sync_batch_norm"):
        if getattr(config, name):
            raise ConfigError(f"{name} is for sequences that one process has: leave out time_ranks")
