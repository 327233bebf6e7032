"""A training run from data to result, and the evaluation of a checkpoint."""

from __future__ import annotations

import contextlib
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
from dataclasses import dataclass
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
from spikefuse.train.batches import EvalBatches, Timed, TrainBatches
from spikefuse.train.callbacks import Checkpoints, Log, Progress
from spikefuse.train.checkpoint import BEST, LAST, Loaded, load, replacing
from spikefuse.train.classifier import Classifier, best_row
from spikefuse.train.config import ConfigError, TrainConfig
from spikefuse.train.interruption import Interrupted, Interruption
from spikefuse.train.layout import check_layout
from spikefuse.train.pictures import draw_curves, draw_raster
from spikefuse.train.processes import Processes, lost_peer
from spikefuse.transforms.fusion import Fusion

RUNS = Path("runs")
DEVICES = ("auto", "cpu", "cuda")
VALIDATION_FRACTION = 0.1
# Fixed, so that runs with different seeds are validated on the same images.
VALIDATION_SEED = 1
# Input values per step, over all time steps and images, that are worth a CPU thread.
VALUES_PER_THREAD = 1 << 15
DTYPES = {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}
LIGHTNING_PRECISION = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}


@dataclass(frozen=True)
class Place:
    """Where a run takes place; its result does not depend on it.

    Args:
        device: auto (CUDA if there is any), cpu or cuda.
        data_dir: folder of the data sets, or None for the default one.
        download: fetch missing data.
        out: a new folder for the run, or None for the next runs/<dataset>-<model>-<n>.
        time_ranks: processes that share a sequence.
        data_ranks: processes that share a batch, or None for all that are left.
        time_chunks: parts of a batch in which neurons' states go from process to process; None for
            1 on GPUs, which do not wait for them, and 4 on CPUs.
    """

    device: str = "auto"
    data_dir: Path | None = None
    download: bool = False
    out: Path | None = None
    time_ranks: int = 1
    data_ranks: int | None = None
    time_chunks: int | None = None


def train(config: TrainConfig, place: Place, resumed: Loaded | None = None) -> dict[str, Any]:
    """Train, test the best epoch once, and write pictures and result into the run's folder.

    Args:
        config: what to train.
        place: where.
        resumed: the checkpoint to continue from; the run goes on in its folder.

    Returns:
        What `result.json` holds.

    Raises:
        ConfigError, DataError: a setting or a file is wrong; nothing has been written, unless it is
            the run's own best.ckpt that turns out wrong at the end.
        Interrupted: a signal stopped the run.
    """
    processes = Processes.started(place.time_ranks)
    check_layout(config, place.time_ranks, place.data_ranks, place.time_chunks, processes)
    device = _device(place.device, config.precision, processes)
    _check_device(config, device, processes)
    with processes.connected(device):
        with processes.one_first():
            rest, test = _load_data(config, place)
        training, validation = data.split(rest, VALIDATION_FRACTION, VALIDATION_SEED)
        _check_data(config, len(training))
        module = _make_module(config, device, processes)
        if resumed is not None:
            _load_weights(module, resumed)  # an early check: Lightning loads them again
        if processes.time > 1:
            if config.on_events:
                raise ConfigError("a network on events can't share its time: drop --time-ranks")
            chunks = place.time_chunks or (1 if device.type == "cuda" else 4)
            module.share_time(make_mesh(None, processes.time, device.type), chunks)
        elif config.on_events:
            _begin_active(module, training)
        existed = resumed is not None or (place.out is not None and place.out.exists())
        directory = _agreed_directory(config, place, resumed, processes)
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
    facts = {**_speed(module, seconds), "resumed": resumed is not None}
    module.alone()  # what follows is done by this one
    try:
        return _finish(module, test, device, directory, facts)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, directory / LAST) from None


def _introduction(module: Classifier, sizes: tuple[int, int, int], device: torch.device) -> str:
    config, processes = module.config, module.processes
    training, validation, test = sizes
    parameters = sum(p.numel() for p in module.parameters())
    several = f", {processes.count} processes" if processes.count > 1 else ""
    events = DATASETS[config.dataset].kind == "events"
    encoding = "event frames" if events else f"{config.encoding} encoding"
    fusion = getattr(module.net, "fusion", None)
    fused = f"\n{fusion.summary}" if isinstance(fusion, Fusion) and fusion.fused else ""
    return (
        f"{config.dataset}: {training:,} training, {validation:,} validation, "
        f"{test:,} test images\n"
        f"{config.model} of {config.neuron} neurons: {parameters:,} parameters, "
        f"{config.num_steps} time steps, {encoding}, on {device.type}{several}{fused}"
    )


def _speed(module: Classifier, seconds: float) -> dict[str, Any]:
    rows = module.history
    return {
        "parameters": sum(p.numel() for p in module.parameters()),
        "training_seconds": round(seconds, 2),
        "images_per_second": round(statistics.median(r["images_per_second"] for r in rows), 1),
        "data_wait": round(statistics.fmean(r.get("data_wait", 0.0) for r in rows), 4),
        "processes": module.processes.count,
    }


def evaluate(loaded: Loaded, place: Place) -> tuple[float, float]:
    """(loss, accuracy) of a checkpoint on the test images of its data set.

    Raises:
        ConfigError, DataError: a setting or a file is wrong.
    """
    config = loaded.config
    device = _device(place.device, config.precision, Processes())
    _, test = _load_data(config, place)
    module = _make_module(config, device)
    _load_weights(module, loaded)
    return _test(module, test, device)


def _load_weights(module: Classifier, loaded: Loaded) -> None:
    try:
        module.load_state_dict(loaded.weights)
    except RuntimeError as error:
        raise ConfigError(
            f"the weights in {loaded.path} do not fit the model {module.config.model}: they come "
            "from another version of spikefuse"
        ) from error


def _fit(
    module: Classifier,
    examples: tuple[Examples, Examples],
    device: torch.device,
    directory: Path,
    resumed: Loaded | None,
) -> None:
    config, processes = module.config, module.processes
    training, validation = (batches.place(part, device) for part in examples)
    size = config.batch_size
    packed = config.on_events
    steps = TrainBatches(
        training, size, config.seed, lambda: module.trainer.global_step, device, packed
    )
    with _quiet(), _threads(config), Interruption(directory / LAST, processes) as interruption:
        callbacks: list[pl.Callback] = [Checkpoints(directory, interruption, processes)]
        if processes.main:
            callbacks = [Progress(), Log(directory), *callbacks]
        trainer = _trainer(config, device, processes, callbacks, directory)
        try:
            trainer.fit(
                module,
                Timed(steps, module.wait),
                EvalBatches(validation, size, device, packed),
                ckpt_path=None if resumed is None else resumed.path,
            )
        except Exception as error:
            if processes.count > 1 and lost_peer(error):
                interruption.give_up(str(error) if isinstance(error, RankLost) else "")
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
    # Before each step it would ask all processes about a signal, and wait for the GPU's answer;
    # `Checkpoints` asks them now and then, on the host.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = (  # type: ignore[method-assign]
        lambda: None
    )
    return trainer


def _load_data(config: TrainConfig, place: Place) -> tuple[Examples, Examples]:
    return data.load(config.dataset, place.data_dir, place.download, **config.transform())


def _test(module: Classifier, test: Examples, device: torch.device) -> tuple[float, float]:
    config = module.config
    module.to(device).eval()
    module.on_test_epoch_start()
    place = batches.place(test, device)
    steps = EvalBatches(place, config.batch_size, device, config.on_events)
    dtype = DTYPES[config.precision]
    autocast = torch.autocast(device.type, dtype, enabled=config.precision != "32")
    with _threads(config), torch.no_grad(), autocast:
        for index, batch in enumerate(tqdm(steps, "test", disable=None, leave=False)):
            module.test_step(batch, index)
    return module.eval_tally.mean()


def _finish(
    module: Classifier, test: Examples, device: torch.device, directory: Path, facts: dict[str, Any]
) -> dict[str, Any]:
    """Test the best epoch, draw the pictures, write and return the result."""
    best = best_row(module.history)
    loaded = load(directory / BEST)
    if not loaded.history or any(
        loaded.history[-1][key] != best[key] for key in ("epoch", "val_accuracy")
    ):
        raise ConfigError(
            f"{loaded.path} is not of epoch {best['epoch']:.0f}, the best of this run: another "
            "run's file, or an old one; train anew"
        )
    _load_weights(module, loaded)
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
    classes = DATASETS[module.config.dataset].classes
    draw_curves(module.history, curves)
    first = batches.contents(test[:1], module.config.on_events).to(device)
    draw_raster(module, first, int(test.labels[0]), classes, raster)
    with replacing(directory / "result.json") as path:
        path.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"test accuracy {100 * accuracy:.2f} % on {len(test):,} images held out, with the weights "
        f"of epoch {result['best_epoch']}\n"
        f"pictures: {curves} and {raster}"
    )
    return result


def _device(name: str, precision: str, processes: Processes) -> torch.device:
    if name not in DEVICES:
        raise ConfigError(f"unknown device {name!r}: choose one of {', '.join(DEVICES)}")
    cuda = torch.cuda.is_available()
    if name == "cuda" and not cuda:
        raise ConfigError("device is cuda, but PyTorch finds no CUDA GPU: choose auto or cpu")
    if name == "cpu" or not cuda:
        if precision == "16":
            raise ConfigError("precision is 16, which needs a CUDA GPU: choose bf16 or 32")
        return torch.device("cpu")
    if processes.count == 1:
        return torch.device("cuda", torch.cuda.current_device())
    if processes.local_count > torch.cuda.device_count():
        raise ConfigError(
            f"{processes.local_count} processes on this machine, but {torch.cuda.device_count()} "
            "GPUs: start torchrun with fewer, or choose --device cpu"
        )
    return torch.device("cuda", processes.local_rank)


def _check_device(config: TrainConfig, device: torch.device, processes: Processes) -> None:
    """What a run asks for and this machine cannot do."""
    if config.cuda_graph and device.type != "cuda":
        raise ConfigError("cuda_graph needs a CUDA GPU: add --no-cuda-graph")
    if config.cuda_graph and processes.count > 1:
        raise ConfigError("cuda_graph is for a single process: add --no-cuda-graph")
    if config.sync_batch_norm and device.type != "cuda":
        raise ConfigError("sync_batch_norm needs CUDA GPUs: add --no-sync-batch-norm")
    if config.batch_size % processes.data:
        raise ConfigError(
            f"batch_size is {config.batch_size}: expected a multiple of the {processes.data} "
            "processes, which share it equally"
        )
    if config.batch_size // processes.data < config.accumulate:
        raise ConfigError(
            f"accumulate is {config.accumulate}: expected at most "
            f"{config.batch_size // processes.data}, each process's share of a batch"
        )


def _check_data(config: TrainConfig, num_training: int) -> None:
    if config.batch_size > num_training:
        raise ConfigError(
            f"batch_size is {config.batch_size}: {config.dataset} has only {num_training} "
            "training images"
        )


def _make_module(
    config: TrainConfig, device: torch.device, processes: Processes | None = None
) -> Classifier:
    module = Classifier(config, processes)
    if config.channels_last or (config.channels_last is None and device.type == "cuda"):
        module.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


def _begin_active(module: Classifier, training: Examples) -> None:
    """Scale the weights of a network on events to the activity asked for, on its first examples."""
    config = module.config
    assert config.activity is not None
    batch = batches.contents(training[: config.batch_size], packed=True)
    try:
        scale_to_rate(module.net.net, module.encode(batch), config.activity)
    except ValueError as error:
        raise ConfigError(
            f"weights are scaled to an activity of {config.activity:g} first, but {error}"
        ) from error


def _agreed_directory(
    config: TrainConfig, place: Place, resumed: Loaded | None, processes: Processes
) -> Path:
    """The folder of the run, made by the main process if it is a new one."""
    outcome: Path | ConfigError | None = None
    if processes.main:
        try:
            outcome = _run_directory(config, place, resumed)
        except ConfigError as error:
            outcome = error
    outcome = processes.told(outcome)
    if isinstance(outcome, ConfigError):
        raise outcome
    assert outcome is not None
    return outcome


def _run_directory(config: TrainConfig, place: Place, resumed: Loaded | None) -> Path:
    """The folder of the run, made if it is a new one."""
    if resumed is not None:
        directory = resumed.path.parent
        if not resumed.resumable:
            raise ConfigError(
                f"{resumed.path} was saved by an earlier version of spikefuse: it can be tested, "
                "but not resumed; train anew"
            )
        if resumed.history and not (directory / BEST).is_file():
            raise ConfigError(
                f"{directory / BEST} is missing: resume a run in the folder where it began"
            )
        if config.epochs < len(resumed.history):
            raise ConfigError(
                f"epochs is {config.epochs}: {resumed.path} has done {len(resumed.history)} already"
            )
        return directory
    try:
        return _new_directory(config, place)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {place.out or RUNS} ({error.strerror}): name another with "
            "--out"
        ) from error


def _new_directory(config: TrainConfig, place: Place) -> Path:
    if place.out is not None:
        if place.out.exists() and (not place.out.is_dir() or any(place.out.iterdir())):
            raise ConfigError(f"{place.out} exists already: name a new folder with --out")
        place.out.mkdir(parents=True, exist_ok=True)
        return place.out
    number = 1
    while True:
        directory = RUNS / f"{config.dataset}-{config.model}-{number}"
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return directory


def _remove(directory: Path, existed: bool) -> None:
    """Take away what a run without a checkpoint left; a folder that was there stays, empty."""
    for path in directory.iterdir() if existed else [directory]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _threads(config: TrainConfig) -> Iterator[None]:
    """Use no more CPU threads than a step has work for.

    Threads that wait for each other within a small step gain little on an idle machine, and on
    one that other programs use too they make it many times slower.
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
    """Keep Lightning's hints, and its own use of what PyTorch deprecates, from the terminal."""
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
