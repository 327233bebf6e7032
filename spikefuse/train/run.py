"""Training runs from data to result."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.loggers import TensorBoardLogger

import spikefuse
from spikefuse.data import DataError, Examples
from spikefuse.data.files import replacing
from spikefuse.distributed import RankLost, make_mesh
from spikefuse.nn import scale_to_rate
from spikefuse.train import batches, folder
from spikefuse.train.callbacks import CheckpointSaver, MetricsWriter, ProgressReporter
from spikefuse.train.checkpoint import BEST, LAST, LoadedRun, best_epoch, load, load_weights
from spikefuse.train.config import RunOptions, TrainConfig
from spikefuse.train.data_module import DataModule
from spikefuse.train.extras import check_logger, make_logger
from spikefuse.train.fields import ConfigError
from spikefuse.train.output import show
from spikefuse.train.plots import plot_curves, plot_raster
from spikefuse.train.predict import device_of, evaluate, threads
from spikefuse.train.processes import Processes, is_connection_error
from spikefuse.train.signals import RunInterrupted, SignalHandler
from spikefuse.train.training_module import LIGHTNING_PRECISION, TrainingModule

TENSORBOARD = "tensorboard"


def train(
    config: TrainConfig, options: RunOptions, resumed: LoadedRun | None = None
) -> dict[str, Any]:
    """Train, test the best epoch once, and write plots and the result into the run's folder.

    Args:
        resumed: the checkpoint to continue from, in its own folder.

    Returns:
        The content of `result.json`; empty in all processes but the main one.

    Raises:
        ConfigError, DataError: a setting or a file is invalid, or another process trains in the
            folder. Nothing has been written, unless an example or the run's own best.ckpt turns out
            to be invalid after the first epoch.
        FloatingPointError: a loss is not finite; the message names what is not, where possible.
        OSError: a file cannot be written; the message names the checkpoint to resume from.
        RunInterrupted: a signal stopped the run.
    """
    with contextlib.ExitStack() as held:  # the lock of the folder
        return _train(config, options, resumed, held)


def _train(
    config: TrainConfig,
    options: RunOptions,
    resumed: LoadedRun | None,
    held: contextlib.ExitStack,
) -> dict[str, Any]:
    if options.logger is not None:
        check_logger(options.logger)
    processes = Processes.started(options.time_ranks)
    device = device_of(options.device, config.precision, processes)
    _check_device(config, device)
    _check_processes(config, options, processes)
    with processes.connected(device):
        examples = DataModule(config, options.data_dir, options.download)
        with processes.local_main_first():
            examples.setup()
        config = examples.config  # with the classes of the files
        module = TrainingModule(config, processes)
        if resumed is not None:
            load_weights(module, resumed)  # only checks them early: Lightning loads them later
            _check_examples(config, examples, resumed)
        if processes.time > 1:
            chunks = options.time_chunks or (1 if device.type == "cuda" else 4)
            module.share_time(make_mesh(None, processes.time, device.type), chunks)
        elif config.on_events:
            _scale_weights(module, examples.training)
        existed = resumed is not None or (options.out is not None and options.out.exists())
        directory = folder.make(config, options, resumed, processes, held)
        if processes.main:
            show(f"{_introduction(module, examples, device)}\nwriting to {directory}")
        start = time.perf_counter()
        try:
            _fit(module, examples, device, directory, resumed, options.logger)
        except BaseException as error:
            saved = (directory / LAST).exists()
            if processes.main and resumed is None and not saved:
                folder.remove(directory, existed)
            late = (OSError, DataError, FloatingPointError) if saved else OSError
            if isinstance(error, late):
                raise folder.with_advice(error, config, options, directory) from error
            raise
        seconds = time.perf_counter() - start
    if not processes.main:
        return {}
    rows = module.history
    if len(rows) < config.epochs:
        missed = "higher validation accuracy" if module.task.of_classes else "lower validation loss"
        show(f"stopped after epoch {len(rows)}: no {missed} with --patience {config.patience}")
    facts = {
        "parameters": sum(p.numel() for p in module.parameters()),
        "training_seconds": round(seconds, 2),
        "images_per_second": round(statistics.median(r["images_per_second"] for r in rows), 1),
        "data_wait": round(statistics.fmean(r.get("data_wait", 0.0) for r in rows), 4),
        "processes": processes.count,
        "resumed": resumed is not None,
    }
    module.detach_processes()
    try:
        return _finish(module, examples.test, device, directory, facts)
    except (OSError, DataError, FloatingPointError) as error:
        raise folder.with_advice(error, config, options, directory) from error
    except KeyboardInterrupt:
        raise RunInterrupted(signal.SIGINT, directory / LAST) from None


# Setup


def _check_device(config: TrainConfig, device: torch.device) -> None:
    if config.cuda_graph and device.type != "cuda":
        raise ConfigError("cuda_graph needs a CUDA GPU: add --no-cuda-graph")
    if config.sync_batch_norm and device.type != "cuda":
        raise ConfigError("sync_batch_norm needs CUDA GPUs: add --no-sync-batch-norm")


def _check_processes(config: TrainConfig, options: RunOptions, processes: Processes) -> None:
    """Check the numbers of processes against the run and against what torchrun started."""
    time, data = options.time_ranks, options.data_ranks
    if time * (processes.count // time if data is None else data) != processes.count:
        raise ConfigError(
            f"time_ranks {time} and data_ranks {data or 'unset'} do not match "
            f"{processes.count} processes: start torchrun --nproc_per_node with their product"
        )
    if time == 1 and options.time_chunks is not None:
        raise ConfigError(
            "time_chunks is given, but time_ranks is 1: set it, or remove time_chunks"
        )
    if config.num_steps < time:
        raise ConfigError(f"num_steps is {config.num_steps}: expected at least time_ranks, {time}")
    if time > 1 and config.on_events:
        raise ConfigError("time_ranks is given, but the model computes on events: remove it")
    if time > 1 and config.is_recurrent:
        raise ConfigError("time_ranks is given, but the layers of the model feed back: remove it")
    for name in ("tbptt", "sync_batch_norm", "rate_penalty"):
        if time > 1 and getattr(config, name):
            raise ConfigError(
                f"{name} is given, but needs whole sequences: remove it, or time_ranks"
            )
    share, rest = divmod(config.batch_size, processes.data)
    if rest:
        raise ConfigError(
            f"batch_size is {config.batch_size}: expected a multiple of the {processes.data} "
            "processes that share a batch"
        )
    if share < config.accumulate:
        raise ConfigError(
            f"accumulate is {config.accumulate}: expected at most {share}, each process's share of "
            "a batch"
        )


def _check_examples(config: TrainConfig, examples: DataModule, resumed: LoadedRun) -> None:
    """Check that a resumed run still has the same examples."""
    epochs = len(resumed.history)
    steps = resumed.history[-1].get("step") if epochs else 0
    if steps != examples.num_batches * epochs:
        raise ConfigError(
            f"{resumed.path} has done {steps} steps in {epochs} epochs, but {config.dataset} now "
            f"has {examples.num_batches} batches: restore the examples with which the run began, "
            "or start a new one"
        )
    if resumed.labels is not None and resumed.labels != examples.label_checksums:
        raise ConfigError(
            f"{config.dataset} now has other examples, or other labels, than {resumed.path} was "
            "trained on, some of which may be in the test: restore those with which the run began, "
            "or start a new one"
        )


def _scale_weights(module: TrainingModule, training: Examples) -> None:
    """Scale the initial weights of an event model to the requested activity."""
    config = module.config
    assert config.activity is not None
    batch = batches.contents(training[: config.batch_size], packed=True)
    try:
        scale_to_rate(module.net.net, module.encode(batch), config.activity)
    except ValueError as error:
        raise ConfigError(
            f"cannot scale the weights to an activity of {config.activity:g}: {error}"
        ) from error


def _introduction(module: TrainingModule, examples: DataModule, device: torch.device) -> str:
    config, processes = module.config, module.processes
    parts = examples.training, examples.validation, examples.test
    training, validation, test = map(len, parts)
    parameters = sum(p.numel() for p in module.parameters())
    neurons = f" with {config.neuron} neurons" if module.neurons_made else ""
    several = f", {processes.count} processes" if processes.count > 1 else ""
    kinds = {"images": f"{config.encoding} encoding", "events": "frames", "series": "values"}
    encoding = kinds[config.data.kind]
    names = ""
    if config.data.describe is not None:  # of a folder, in which others may lie than classes
        count, first = len(config.data.classes), ", ".join(config.data.classes[:5])
        names = f"{count:,} classes ({first}{', ...' * (count > 5)}), "
    obstacle = config.graph_obstacle(device, processes.count)
    graph = "\ntraining steps are recorded as a CUDA graph (--no-cuda-graph turns this off)"
    if obstacle:
        graph = f"\ntraining steps are not recorded as a CUDA graph: {obstacle}"
    if device.type != "cuda":
        graph = ""
    return (
        f"{config.dataset}: {names}{training:,} training, {validation:,} validation, "
        f"{test:,} test samples\n"
        f"{config.model}{neurons}: {parameters:,} parameters, "
        f"{config.num_steps} time steps, {encoding}, on {device.type}{several}{graph}"
    )


# Training and test


def _fit(
    module: TrainingModule,
    examples: DataModule,
    device: torch.device,
    directory: Path,
    resumed: LoadedRun | None,
    logger: str | None,
) -> None:
    config, processes = module.config, module.processes
    with _quiet(), threads(config), SignalHandler(directory / LAST, processes) as signals:
        saver = CheckpointSaver(directory, signals)
        callbacks: list[pl.Callback] = [saver]
        if processes.main:
            callbacks = [ProgressReporter(), MetricsWriter(directory), *callbacks]
        trainer = _trainer(module, device, callbacks, directory)
        if processes.main:
            own = [] if logger is None else [make_logger(logger, directory, config)]
            trainer.loggers = [TensorBoardLogger(directory, None, TENSORBOARD), *own]
        try:
            path = None if resumed is None else resumed.path
            trainer.fit(module, datamodule=examples, ckpt_path=path)
        except Exception as error:
            if processes.count > 1 and is_connection_error(error):
                signals.give_up(str(error) if isinstance(error, RankLost) else "")
            if resumed is None or saver.started or isinstance(error, (OSError, DataError)):
                raise
            raise ConfigError(
                f"cannot resume {resumed.path} ({type(error).__name__}): it is damaged or was "
                "changed; use an intact copy, or start a new run"
            ) from error


def _trainer(
    module: TrainingModule, device: torch.device, callbacks: list[pl.Callback], directory: Path
) -> pl.Trainer:
    config, processes = module.config, module.processes
    several = processes.count > 1
    trainer = pl.Trainer(
        inference_mode=False,  # in which batch norms do not fuse
        accelerator=device.type,
        devices=processes.local_count if several else 1 if device.index is None else [device.index],
        num_nodes=processes.count // processes.local_count,
        strategy="ddp" if several else "auto",
        sync_batchnorm=several and config.sync_batch_norm,
        precision=LIGHTNING_PRECISION[config.precision],  # type: ignore[arg-type]
        max_epochs=config.epochs,
        callbacks=callbacks,
        plugins=[TorchElasticEnvironment() if several else LightningEnvironment()],
        default_root_dir=directory,
        num_sanity_val_steps=0,
        benchmark=device.type == "cuda",
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Lightning would synchronize all processes and the GPU before each step to check for signals;
    # `CheckpointSaver` does so every few steps, on the host.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = (  # type: ignore[method-assign]
        lambda: None
    )
    return trainer


def _finish(
    module: TrainingModule,
    test: Examples,
    device: torch.device,
    directory: Path,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Test the best epoch, plot, and write and return the result."""
    best = best_epoch(module.history)
    loaded = load(directory / BEST)
    if not loaded.history or any(
        loaded.history[-1][key] != best[key] for key in ("epoch", "val_loss")
    ):
        raise ConfigError(
            f"{loaded.path} is not from epoch {best['epoch']:.0f}, the best of this run: it "
            "belongs to another run or is outdated; start a new run"
        )
    load_weights(module, loaded)
    net, task = module.net.to(device), module.task
    metrics = evaluate(net, test, module.config, device, module.processes)
    if not math.isfinite(metrics["loss"]):
        raise FloatingPointError(f"the loss of the test is {metrics['loss']}: check its examples")
    names = [name for name in metrics if name != "loss"]
    result = {
        **{f"test_{name}": metrics[name] for name in (*names, "loss")},
        "test_images": len(test),
        "best_epoch": int(best["epoch"]),
        **{f"validation_{name}": best[f"val_{name}"] for name in names},
        **facts,
        "config": module.config.to_dict(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {"spikefuse": spikefuse.__version__, "torch": torch.__version__},
    }
    text = json.dumps(result, indent=2)
    curves, raster = directory / "curves.png", directory / "raster.png"
    plot_curves(module.history, curves)
    first = batches.contents(test[:1], module.config.on_events).to(device)
    plot_raster(module, first, test.labels[0].cpu(), raster)
    with replacing(directory / "result.json") as path:
        path.write_text(f"{text}\n")
    show(
        f"test {task.describe(metrics)} on {len(test):,} test samples, with the weights of epoch "
        f"{result['best_epoch']}\n"
        f"plots: {curves} and {raster}"
    )
    read: dict[str, Any] = json.loads(text)  # with lists in place of tuples, as later calls return
    return read


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Lightning's hints and its own deprecation warnings."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
            yield
    finally:
        logger.setLevel(level)
