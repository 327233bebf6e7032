"""The trainer behind `spikefuse train`.

Only `config` and `cli` import quickly; the other modules need the extra `spikefuse[train]`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spikefuse.train.config import TrainConfig
from spikefuse.train.fields import ConfigError

if TYPE_CHECKING:
    from spikefuse.train.data_module import DataModule
    from spikefuse.train.from_python import fit
    from spikefuse.train.training_module import TrainingModule

__all__ = ["ConfigError", "DataModule", "TrainConfig", "TrainingModule", "fit"]

_LAZY = {"TrainingModule": "training_module", "DataModule": "data_module", "fit": "from_python"}


def __getattr__(name: str) -> Any:
    """Import what needs Lightning when it is first used."""
    if name in _LAZY:
        return getattr(import_module(f"spikefuse.train.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'spikefuse.train' has no attribute {name!r}")
