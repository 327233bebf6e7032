"""How a run is divided over processes, and the checks of that division."""

from __future__ import annotations

from dataclasses import dataclass

from spikefuse.train.config import ConfigError, TrainConfig
from spikefuse.train.processes import Processes


@dataclass(frozen=True)
class Parallelism:
    """How processes share batches and sequences.

    Args:
        time_ranks: processes that share a sequence.
        data_ranks: processes that share a batch, or None for all that remain.
        time_chunks: microbatches between which states pass from process to process; None for 1 on
            GPUs, which do not wait for states, and 4 on CPUs.
    """

    time_ranks: int = 1
    data_ranks: int | None = None
    time_chunks: int | None = None

    def check(self, config: TrainConfig, processes: Processes) -> None:
        """Check the numbers of processes against the run and against what torchrun started.

        Raises:
            ConfigError: they do not fit.
        """
        time, data = self.time_ranks, self.data_ranks
        if min(n for n in (time, data, self.time_chunks) if n is not None) < 1:
            raise ConfigError("time_ranks, data_ranks and time_chunks must be at least 1")
        if time * (processes.count // time if data is None else data) != processes.count:
            raise ConfigError(
                f"time_ranks {time} and data_ranks {data or 'unset'} do not match "
                f"{processes.count} processes: start torchrun --nproc_per_node with their product"
            )
        if time == 1:
            return
        if config.num_steps < time:
            raise ConfigError(
                f"num_steps is {config.num_steps}: expected at least time_ranks, {time}"
            )
        if config.on_events:
            raise ConfigError("time_ranks is given, but the model computes on events: remove it")
        for name in ("tbptt", "sync_batch_norm"):
            if getattr(config, name):
                raise ConfigError(
                    f"{name} is given, but works on undivided sequences only: remove time_ranks"
                )
