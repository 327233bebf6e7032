"""The trainer behind `spikefuse train`.

Only `config` and `cli` import quickly; the other modules need the extra `spikefuse[train]`.
"""

from spikefuse.train.config import ConfigError, TrainConfig

__all__ = ["ConfigError", "TrainConfig"]
