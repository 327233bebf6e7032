"""The trainer behind `spikefuse train`. Only `config` is cheap to import; the rest needs the
packages of the extra `spikefuse[train]`."""

from spikefuse.train.config import ConfigError, TrainConfig

__all__ = ["ConfigError", "TrainConfig"]
