"""Training runs from data to result, and the evaluation of checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import shutil
import signal
import statistics
import sys
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
from tqdm import tqdm

import spikefuse
from spikefuse import data
from spikefuse.data import DATASETS, Examples
from spikefuse.distributed import RankLost, make_mesh
from spikefuse.nn import scale_to_rate
from spikefuse.train import batches
from spikefuse.train.batches import EvalBatches, TrainBatches
from spikefuse.train.callbacks import CheckpointSaver, MetricsWriter, ProgressReporter
from spikefuse.train.checkpoint import BEST, LAST, LoadedRun, load, load_weights, replacing
from spikefuse.train.classifier import Classifier, best_epoch
from spikefuse.train.config import ConfigError, RunOptions, TrainConfig
from spikefuse.train.plots import plot_curves, plot_raster
from spikefuse.train.predict import find_device
from spikefuse.train.processes import Processes, is_connection_error
from spikefuse.train.signals import RunInterrupted, SignalHandler

RUNS = Path("runs")
VALIDATION_FRACTION = 0.1
# Fixed, so that runs with different seeds are validated on the same examples.
VALIDATION_SEED = 1
# Input values per CPU thread and training step (time steps × batch × input size).
VALUES_PER_THREAD = 1 << 15
LIGHTNING_PRECISION = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}


def train(
    config: TrainConfig, options: RunOptions, resumed: LoadedRun | None = None
) -> dict[str, Any]:
    """Train, test the best epoch once, and write plots and the result into the run's folder.

    Args:
        resumed: the checkpoint to continue from, in its own folder.

    Returns:
        The content of `result.json`; empty in all processes but the main one.

    Raises:
        ConfigError, DataError: a setting or a file is invalid. Nothing has been written, unless the
            run's own best.ckpt turns out to be invalid at the end.
        RunInterrupted: a signal stopped the run.
    """
    processes = Processes.started(options.time_ranks)
    device = _device(options.device, config.precision, processes)
    _check_device(config, device)
    _check_processes(config, options, processes)
    with processes.connected(device):
        with processes.local_main_first():
            rest, test = _load_data(config, options)
        training, validation = data.split(rest, VALIDATION_FRACTION, VALIDATION_SEED)
        if config.batch_size > len(training):
            raise ConfigError(
                f"batch_size is {config.batch_size}: {config.dataset} has only {len(training)} "
                "training images"
            )
        module = _make_module(config, device, processes)
        if resumed is not None:
            load_weights(module, resumed)  # only checks them early: Lightning loads them later
        if processes.time > 1:
            chunks = options.time_chunks or (1 if device.type == "cuda" else 4)
            module.share_time(make_mesh(None, processes.time, device.type), chunks)
        elif config.on_events:
            _scale_weights(module, training)
        existed = resumed is not None or (options.out is not None and options.out.exists())
        directory = _run_directory(config, options, resumed, processes)
        if processes.main:
            sizes = (len(training), len(validation), len(test))
            print(_introduction(module, sizes, device), f"writing to {directory}", sep="\n")
            sys.stdout.flush()
        start = time.perf_counter()
        try:
            _fit(module, (training, validation), device, directory, resumed)
        except BaseException:
            if processes.main and resumed is None and not (directory / LAST).exists():
                _remove(directory, existed)
            raise
        seconds = time.perf_counter() - start
    if not processes.main:
        return {}
    rows = module.history
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
        return _finish(module, test, device, directory, facts)
    except KeyboardInterrupt:
        raise RunInterrupted(signal.SIGINT, directory / LAST) from None


def evaluate(loaded: LoadedRun, options: RunOptions) -> tuple[float, float]:
    """Return the loss and the accuracy of a checkpoint on the test examples of its dataset.

    Raises:
        ConfigError, DataError: a setting or a file is invalid.
    """
    config = loaded.config
    device = _device(options.device, config.precision, Processes())
    _, test = _load_data(config, options)
    module = _make_module(config, device)
    load_weights(module, loaded)
    return _test(module, test, device)


# Setup


def _device(name: str, precision: str, processes: Processes) -> torch.device:
    device = find_device(name)
    if device.type == "cpu":
        if precision == "16":
            raise ConfigError("precision is 16, which needs a CUDA GPU: choose bf16 or 32")
        return device
    if processes.count == 1:
        return torch.device("cuda", torch.cuda.current_device())
    if processes.local_count > torch.cuda.device_count():
        raise ConfigError(
            f"{processes.local_count} processes on this machine, but {torch.cuda.device_count()} "
            "GPUs: start fewer with torchrun, or choose --device cpu"
        )
    return torch.device("cuda", processes.local_rank)


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
    if config.num_steps < time:
        raise ConfigError(f"num_steps is {config.num_steps}: expected at least time_ranks, {time}")
    if time > 1 and config.on_events:
        raise ConfigError("time_ranks is given, but the model computes on events: remove it")
    for name in ("tbptt", "sync_batch_norm"):
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


def _load_data(config: TrainConfig, options: RunOptions) -> tuple[Examples, Examples]:
    return data.load(config.dataset, options.data_dir, options.download, **config.transform())


def _make_module(
    config: TrainConfig, device: torch.device, processes: Processes | None = None
) -> Classifier:
    module = Classifier(config, processes)
    if config.channels_last is not False:  # None in older checkpoints
        module.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


def _scale_weights(module: Classifier, training: Examples) -> None:
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


def _introduction(module: Classifier, sizes: tuple[int, int, int], device: torch.device) -> str:
    config, processes = module.config, module.processes
    training, validation, test = sizes
    parameters = sum(p.numel() for p in module.parameters())
    several = f", {processes.count} processes" if processes.count > 1 else ""
    events = DATASETS[config.dataset].kind == "events"
    encoding = "event frames" if events else f"{config.encoding} encoding"
    obstacle = config.graph_obstacle(device, processes.count)
    graph = "\ntraining steps are recorded as a CUDA graph (--no-cuda-graph turns this off)"
    if obstacle:
        graph = f"\ntraining steps are not recorded as a CUDA graph: {obstacle}"
    if device.type != "cuda":
        graph = ""
    return (
        f"{config.dataset}: {training:,} training, {validation:,} validation, "
        f"{test:,} test images\n"
        f"{config.model} with {config.neuron} neurons: {parameters:,} parameters, "
        f"{config.num_steps} time steps, {encoding}, on {device.type}{several}{graph}"
    )


# The folder of a run


def _run_directory(
    config: TrainConfig, options: RunOptions, resumed: LoadedRun | None, processes: Processes
) -> Path:
    """Return the folder of the run; the main process creates it if it is new."""
    outcome: Any = None
    if processes.main:
        try:
            if resumed is None:
                outcome = _new_directory(config, options)
            else:
                outcome = _resumed_directory(config, resumed)
        except ConfigError as error:
            outcome = error
        except OSError as error:
            where = f"cannot make the folder {options.out or RUNS} ({error.strerror})"
            outcome = ConfigError(f"{where}: choose another with --out")
    outcome = processes.broadcast(outcome)
    if isinstance(outcome, ConfigError):
        raise outcome
    return outcome


def _resumed_directory(config: TrainConfig, resumed: LoadedRun) -> Path:
    directory = resumed.path.parent
    if not resumed.resumable:
        raise ConfigError(
            f"{resumed.path} was saved by an earlier version of spikefuse: it can be tested, "
            "but not resumed; start a new run"
        )
    if resumed.history and not (directory / BEST).is_file():
        raise ConfigError(
            f"{directory / BEST} is missing: resume a run in the folder in which it started"
        )
    if config.epochs < len(resumed.history):
        raise ConfigError(
            f"epochs is {config.epochs}: {resumed.path} has done {len(resumed.history)} already"
        )
    return directory


def _new_directory(config: TrainConfig, options: RunOptions) -> Path:
    out = options.out
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} exists already: choose a new folder with --out")
        out.mkdir(parents=True, exist_ok=True)
        return out
    for number in itertools.count(1):
        directory = RUNS / f"{config.dataset}-{config.model}-{number}"
        with contextlib.suppress(FileExistsError):
            directory.mkdir(parents=True)
            return directory
    raise AssertionError


def _remove(directory: Path, existed: bool) -> None:
    """Delete what a run without a checkpoint wrote, except a folder that existed before it."""
    for path in directory.iterdir() if existed else [directory]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# Training and test


def _fit(
    module: Classifier,
    examples: tuple[Examples, Examples],
    device: torch.device,
    directory: Path,
    resumed: LoadedRun | None,
) -> None:
    config, processes = module.config, module.processes
    training, validation = (batches.place(part, device) for part in examples)
    size, packed = config.batch_size, config.on_events
    steps = TrainBatches(
        training, size, config.seed, lambda: module.trainer.global_step, device, packed
    )
    with _quiet(), _threads(config), SignalHandler(directory / LAST, processes) as signals:
        callbacks: list[pl.Callback] = [CheckpointSaver(directory, signals)]
        if processes.main:
            callbacks = [ProgressReporter(), MetricsWriter(directory), *callbacks]
        trainer = _trainer(config, device, processes, callbacks, directory)
        try:
            trainer.fit(
                module,
                steps,
                EvalBatches(validation, size, device, packed),
                ckpt_path=None if resumed is None else resumed.path,
            )
        except Exception as error:
            if processes.count > 1 and is_connection_error(error):
                signals.give_up(str(error) if isinstance(error, RankLost) else "")
            raise


def _trainer(
    config: TrainConfig,
    device: torch.device,
    processes: Processes,
    callbacks: list[pl.Callback],
    directory: Path,
) -> pl.Trainer:
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


def _test(module: Classifier, test: Examples, device: torch.device) -> tuple[float, float]:
    module.to(device)
    size, packed = module.config.batch_size, module.config.on_events
    steps = EvalBatches(batches.place(test, device), size, device, packed)
    with _threads(module.config):
        return module.evaluate(tqdm(steps, "test", disable=None, leave=False))


def _finish(
    module: Classifier, test: Examples, device: torch.device, directory: Path, facts: dict[str, Any]
) -> dict[str, Any]:
    """Test the best epoch, plot, and write and return the result."""
    best = best_epoch(module.history)
    loaded = load(directory / BEST)
    if not loaded.history or any(
        loaded.history[-1][key] != best[key] for key in ("epoch", "val_accuracy")
    ):
        raise ConfigError(
            f"{loaded.path} is not from epoch {best['epoch']:.0f}, the best of this run: it "
            "belongs to another run or is outdated; start a new run"
        )
    load_weights(module, loaded)
    loss, accuracy = _test(module, test, device)
    result = {
        "test_accuracy": accuracy,
        "test_loss": loss,
        "test_images": len(test),
        "best_epoch": int(best["epoch"]),
        "validation_accuracy": best["val_accuracy"],
        **facts,
        "config": module.config.to_dict(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {"spikefuse": spikefuse.__version__, "torch": torch.__version__},
    }
    curves, raster = directory / "curves.png", directory / "raster.png"
    plot_curves(module.history, curves)
    first = batches.contents(test[:1], module.config.on_events).to(device)
    plot_raster(module, first, int(test.labels[0]), raster)
    with replacing(directory / "result.json") as path:
        path.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"test accuracy {100 * accuracy:.2f} % on {len(test):,} test images, with the weights "
        f"of epoch {result['best_epoch']}\n"
        f"plots: {curves} and {raster}"
    )
    return result


@contextlib.contextmanager
def _threads(config: TrainConfig) -> Iterator[None]:
    """Limit the number of CPU threads to the work of a step.

    Small steps gain little from more threads. On a busy machine, where threads wait for each other,
    they become many times slower.
    """
    before = torch.get_num_threads()
    values = config.num_steps * config.batch_size * math.prod(DATASETS[config.dataset].shape)
    torch.set_num_threads(max(1, min(before, values // VALUES_PER_THREAD)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
