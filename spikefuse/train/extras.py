"""Callbacks and loggers of Lightning that options of a run ask for."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import loggers
from lightning.pytorch.callbacks import EarlyStopping, WeightAveraging
from torch.optim.swa_utils import get_ema_multi_avg_fn

from spikefuse.train import own
from spikefuse.train.config import TrainConfig
from spikefuse.train.fields import ConfigError, check

LOGGERS: dict[str, Any] = {
    name.removesuffix("Logger").lower(): getattr(loggers, name)
    for name in loggers.__all__
    if name != "Logger"
}


def optional_callbacks(config: TrainConfig) -> list[pl.Callback]:
    """Return early stopping and the moving average of the weights, if they are asked for.

    The average is what is validated, tested and saved as the weights; batch norm statistics are
    averaged too. Checkpoints also hold the weights that training continues from.
    """
    callbacks: list[pl.Callback] = []
    if config.patience is not None:
        by_accuracy = config.make_task().of_classes
        metric, mode = ("val_accuracy", "max") if by_accuracy else ("val_loss", "min")
        callbacks.append(Patience(metric, mode=mode, patience=config.patience))
    if config.ema is not None:
        callbacks.append(MovingAverage(multi_avg_fn=get_ema_multi_avg_fn(config.ema)))
    return callbacks


class Patience(EarlyStopping):
    """Lightning's `EarlyStopping`, which also ends a resumed run that it had ended before."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.wait_count >= self.patience:
            trainer.should_stop = True


class MovingAverage(WeightAveraging):
    """Lightning's `WeightAveraging`, without waiting for the GPU at each step."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if (model := self._average_model) is not None:
            model.n_averaged = model.n_averaged.cpu()  # Python reads it before each update


def check_logger(name: str) -> None:
    """Raise ConfigError unless there is a logger of this name; import a user's own."""
    if own.is_reference(name):
        own.import_attribute("logger", name)
    else:
        check("logger", name, str, LOGGERS)


def make_logger(name: str, directory: Path, config: TrainConfig) -> loggers.Logger:
    """Make a logger, and log the settings of the run.

    Args:
        name: of a logger of Lightning, which writes to `directory` if it writes files and is set up
            by its environment variables, or "module:function", which is called with the directory.

    Raises:
        ConfigError: there is no such logger, or it is not installed.
    """
    check_logger(name)
    if own.is_reference(name):
        logger = own.import_attribute("logger", name)(directory)
        if not isinstance(logger, loggers.Logger):
            raise ConfigError(
                f"logger is {name}, which has returned a {type(logger).__name__}: expected a "
                "lightning.pytorch.loggers.Logger"
            )
    else:
        places = {"save_dir", "root_dir"} & inspect.signature(LOGGERS[name]).parameters.keys()
        try:
            logger = LOGGERS[name](**{place: str(directory) for place in places})
        except ModuleNotFoundError as error:
            what = " ".join(str(error).split())
            raise ConfigError(f"logger is {name}, whose package is missing ({what})") from error
    logger.log_hyperparams(config.to_dict())
    return logger
