"""Accuracy over training time on CIFAR-10: spikefuse, SpikingJelly and ReLU in the same network.

    python -m benchmarks.accuracy --epochs 90 --seeds 0 1 2
    python -m benchmarks.accuracy --epochs 90 --checkpoints /tmp/accuracy --seconds 540

CIFAR-10 is read as JPEG copies from `cifar10/cifar10_{train,test}_jpeg.npz` in the data folder,
which are lossy: accuracies are close to those on the original images, but not the same. All
networks are `sew_resnet18` for small images, or another of our ResNets, VGG11 or transformers, with
the same weights at the start, batches, augmentation and schedule: SGD with Nesterov momentum or
AdamW, a one-cycle learning rate, label smoothing, bfloat16 and channels-last. The images are on the
device as bytes. Without neurons, attention is between ReLUs.

A spiking network runs T steps of LIF neurons on the same image, with soft resets without gradients
and a triangular surrogate. Its first epochs may train one step (`--early`), which takes a fraction
of the time; evaluation is always on T steps. Both kinds compute the layers before the first neuron
once for all steps. SpikingJelly's neurons are its function with explicit precision (see
`benchmarks.jelly`) on the folded tensor. The ReLU network sees the image once. Each step is
recorded as a CUDA graph where it can be.

There is a row for each epoch. `seconds` are those of its training steps, with compilation and
recording in the first epoch and after a continuation. Evaluation, on all test images in every
epoch, is not counted. After its last epoch, `profile` of the settings gets milliseconds per batch
of each part of a run's step, as differences between steps that end earlier, and of evaluation, and
the images per second that are read and augmented alone. With `--seconds` the script stops at the
end of an epoch, before that time; called again with the same options and `--checkpoints`, it
continues. Quick runs use random images.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import layers, plots, runner
from benchmarks.jelly import Function, Jelly
from benchmarks.runner import Record, cudnn_search, synchronize
from spikefuse import data, models
from spikefuse.data import Images
from spikefuse.data.files import default_directory, replacing
from spikefuse.nn.encode import direct
from spikefuse.train.batches import EvalBatches, TrainBatches
from spikefuse.train.seeding import Purpose, reseed

OURS, JELLY, RELU = NAMES = (layers.OURS, "spikingjelly", "relu")
RESNETS = ("sew_resnet18", "sew_resnet34", "ms_resnet18", "ms_resnet34", "resnet18", "resnet34")
MODELS = (*RESNETS, "vgg11", "spikformer", "qkformer")
OPTIMIZERS = ("sgd", "adamw")


def mean_logits(outputs: Tensor) -> Tensor:
    return outputs.mean(0, dtype=torch.float32)


# From images `[B, ...]` and a number of time steps T to logits `[T, B, classes]`.
Call = Callable[[Tensor, int], Tensor]
DECAY = 0.5
CLASSES, MEAN, STD = 10, (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
MOMENTUM, EVAL_BATCH = 0.9, 1000
LAST_SIGMA = 0.5  # of the bumps of learned delays, in steps
QUICK = {"epochs": 2, "batch": 8, "T": 2}
# Options that change no row.
PLACES = ("checkpoints", "names", "rounds", "seconds", "seeds", "started")
# Parts of a training step. A step that ends after one of them has run those before it too.
PARTS = ("augmentation", "forward", "backward", "optimizer")


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("accuracy", __doc__)
    add_image_options(parser, NAMES)
    args = parse(parser, argv, QUICK)
    parts, described = load_images(args)
    with cudnn_search(torch.device(args.device)):
        return train_all(args, ImageRun, lambda seed: parts, described)


# Shared with spoken_digits


def add_options(
    parser: argparse.ArgumentParser, names: Sequence[str], defaults: dict[str, Any]
) -> None:
    add = parser.add_argument
    add("--names", nargs="+", default=list(names), choices=names, help="networks (all)")
    add("--seeds", type=int, nargs="+", default=[0], help="(0)")
    for name, text in (
        ("epochs", "of the schedule"),
        ("batch", "examples of a step"),
        ("lr", "highest learning rate"),
        ("rise", "share of the run before it"),
    ):
        usual = defaults[name]
        add(f"--{name}", type=type(usual), default=usual, help=f"{text} ({usual:g})")
    add("--seconds", type=float, help="stop before this time, evaluation included")
    add("--checkpoints", type=Path, help="folder of checkpoints, to continue from")
    add("--data-dir", type=Path, default=default_directory(), help="data folder")


def parse(
    parser: argparse.ArgumentParser, argv: list[str] | None, quick: Record
) -> argparse.Namespace:
    args = runner.parse(parser, argv)
    vars(args).update(quick if args.quick else {})
    if args.seconds is not None and args.checkpoints is None:
        parser.error("--seconds needs --checkpoints, to continue from")
    args.started = time.perf_counter()
    return args


def narrow_delays(net: nn.Module, progress: float) -> None:
    """Set the width of the bumps of learned delays, from the largest (progress 0) to the last."""
    for layer in net.modules():
        if isinstance(layer, sf.DelayedLinear):
            ratio = 2 * LAST_SIGMA / layer.max_delay
            layer.sigma.fill_(layer.max_delay / 2 * ratio ** min(1.0, progress))


def train_all(
    args: argparse.Namespace,
    kind: type[Run],
    load: Callable[[int], Sequence[Any]],
    described: str,
) -> Path:
    """Train each network with each seed, on the training and test examples of `load`."""
    settings = {k: v for k, v in runner.settings_of(args).items() if k not in PLACES}
    settings["data"] = described
    left_out: list[Record] = []
    profile: Record = {}

    def rows() -> Iterator[Record]:
        longest = 0.0
        for seed in args.seeds:
            for name in args.names:
                run: Run | None = None
                with runner.leaving_out(name, left_out):  # the others are still trained
                    run = kind(name, seed, args, *load(seed))
                if run is None:
                    continue
                yield from run.load(settings)
                while len(run.rows) < args.epochs:
                    begun = time.perf_counter()
                    if args.seconds is not None and begun + longest > args.started + args.seconds:
                        return
                    run.rows.append(run.train() | {"accuracy": run.accuracy()})
                    longest = max(longest, time.perf_counter() - begun)
                    run.save(settings)
                    yield run.rows[-1]
                if not run.profile:
                    run.profile = run.measure()
                    run.save(settings)
                profile[f"{name}, seed {seed}"] = run.profile
                del run
                runner.release(torch.device(args.device))

    given = settings | {"profile": profile}
    return runner.write_rows(args, rows(), given, left_out, plots.accuracy)


def size_of(net: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(p.numel() for p in net.parameters())


class Run:
    """The training of one network: its state, and a step that a CUDA graph can hold."""

    unit, eval_batch = "images", EVAL_BATCH

    def __init__(
        self, name: str, seed: int, args: argparse.Namespace, training: Any, testing: Any
    ) -> None:
        self.args, self.name, self.seed, self.device = args, name, seed, torch.device(args.device)
        self.testing = testing
        self.rows: list[Record] = []  # one per epoch
        self.profile: Record = {}  # after the last one
        self.batches = TrainBatches(
            training, args.batch, self.device, seed=seed, steps_done=self.steps_done
        )
        reseed(seed, Purpose.WEIGHTS)
        self.net = self.make_network()
        self.optimizer = self.make_optimizer()
        steps, rise = args.epochs * len(self.batches), args.rise
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, rates, steps, pct_start=rise, cycle_momentum=False
        )
        self.parts = {"net": self.net, "optimizer": self.optimizer, "schedule": self.schedule}
        self.step: Any = sf.graph_step(self._step, self.net, self.optimizer, fallback=True)

    def make_network(self) -> nn.Module:
        raise NotImplementedError

    def make_optimizer(self) -> torch.optim.Optimizer:
        raise NotImplementedError

    def outputs(self, x: Tensor, steps: int) -> Tensor:
        """Return outputs `[T, B, classes]` of a batch of examples."""
        raise NotImplementedError

    def _step(self, x: Tensor, labels: Tensor, steps: int) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(mean_logits(self.outputs(x, steps)), labels)
        loss.backward()
        self.optimizer.step()
        return loss

    def steps_done(self) -> int:
        return len(self.rows) * len(self.batches)

    def train(self) -> Record:
        """Train for an epoch."""
        epoch, num = len(self.rows), len(self.batches)
        steps = 1 if epoch < self.args.early else self.args.T
        reseed(self.seed, Purpose.STEP, epoch)
        self.net.train()
        synchronize(self.device)
        start = time.perf_counter()
        total = torch.zeros((), device=self.device)
        for batch in self.batches:
            total += self.step(*batch, steps)
            self.schedule.step()
        synchronize(self.device)
        seconds = time.perf_counter() - start
        return {
            **{"name": self.name, "seed": self.seed, "epoch": epoch + 1, "T": steps},
            "loss": round(total.item() / num, 5),
            "seconds": round(seconds, 3),
            f"{self.unit}_per_s": round(num * self.batches.batch_size / seconds),
            "graph": getattr(self.step, "num_replays", 0) > 0,
        }

    @torch.no_grad()
    def accuracy(self) -> float:
        self.net.eval()
        batches = EvalBatches(self.testing, self.eval_batch, self.device)
        right = [
            (mean_logits(self.outputs(x, self.args.T)).argmax(1) == y).sum() for x, y in batches
        ]
        return int(torch.stack(right).sum()) / len(self.testing)

    def measure(self) -> Record:
        """Return the times of the parts of a step."""
        return {}

    @torch.no_grad()
    def rate(self) -> float | None:
        """Return the spikes per neuron and step, on the first test examples; None if unknown."""
        rates: list[Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda _, __, y: rates.append(y.float().mean()))
            for layer in self.net.modules()
            if isinstance(layer, sf.Neuron | sf.PSN | sf.Recurrent | sf.OverTime)
            and not isinstance(layer, sf.LI)
        ]
        self.net.eval()
        x, _ = next(iter(EvalBatches(self.testing, self.args.batch, self.device)))
        self.outputs(x, self.args.T)
        for hook in hooks:
            hook.remove()
        return round(torch.stack(rates).mean().item(), 4) if rates else None

    # Checkpoints

    @property
    def path(self) -> Path | None:
        folder = self.args.checkpoints
        return folder and folder / f"{self.name}-{self.seed}.pt"

    def save(self, settings: Record) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = {"settings": settings, "rows": self.rows, "profile": self.profile}
            state = {name: part.state_dict() for name, part in self.parts.items()}
            with replacing(self.path) as temporary:
                torch.save(content | state, temporary)

    def load(self, settings: Record) -> list[Record]:
        """Continue from a checkpoint, if there is one; return the rows of its epochs.

        Raises:
            SystemExit: its run had other settings.
        """
        if self.path is not None and self.path.is_file():
            found = torch.load(self.path, map_location=self.device, weights_only=True)
            if found["settings"] != settings:
                raise SystemExit(f"{self.path} has other settings: choose another --checkpoints")
            for name, part in self.parts.items():
                part.load_state_dict(found[name])
            self.rows, self.profile = found["rows"], found["profile"]
        return self.rows


# CIFAR-10


def add_image_options(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    add_options(parser, names, {"epochs": 60, "batch": 500, "lr": 0.2, "rise": 0.2})
    add = parser.add_argument
    add("--model", default=MODELS[0], choices=MODELS, help=f"({MODELS[0]})")
    add("--T", type=int, default=4, help="time steps (4)")
    add("--early", type=int, default=0, help="first epochs that train one time step only (0)")
    add("--optimizer", default=OPTIMIZERS[0], choices=OPTIMIZERS, help=f"({OPTIMIZERS[0]})")
    add("--weight-decay", type=float, default=5e-4, help="of weights, not of norms (5e-4)")
    add("--smoothing", type=float, default=0.1, help="of labels (0.1)")
    add("--shift", type=int, default=4, help="pixels (4)")
    add("--cutout", type=int, default=16, help="side in pixels (16)")
    add("--cutmix", type=float, default=0.0, help="alpha, 0 for none (0)")
    add("--trivial-augment", action="store_true", help="change images by TrivialAugment")


def load_images(args: argparse.Namespace) -> tuple[list[Images], str]:
    """Return training and test images on the device, and what they are."""
    if args.quick:
        drawn = np.random.default_rng(0).integers(256, size=(10, 3, 16, 16), dtype=np.uint8)
        parts = [Images(torch.from_numpy(drawn), torch.arange(10))] * 2
    else:
        folder = args.data_dir / "cifar10"
        parts = [decode(folder / f"cifar10_{part}_jpeg.npz") for part in ("train", "test")]
    device = torch.device(args.device)
    described = "random images" if args.quick else "CIFAR-10, JPEG copies"
    return [part.to(device) for part in parts], described


def decode(path: Path) -> Images:
    """Decode a file of JPEG images, one after the other in `jpeg`, which begin at `offsets`."""
    from PIL import Image

    with np.load(path) as file:
        content, offsets, labels = file["jpeg"], file["offsets"].tolist(), file["labels"]
    pixels = np.empty((len(labels), 32, 32, 3), np.uint8)

    def read(i: int) -> None:
        image = io.BytesIO(content[offsets[i] : offsets[i + 1]].tobytes())
        pixels[i] = np.asarray(Image.open(image))

    with ThreadPoolExecutor() as threads:
        list(threads.map(read, range(len(labels))))
    planes = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    return Images(planes, torch.from_numpy(labels.astype(np.int64)))


def make_network(name: str, args: argparse.Namespace) -> tuple[nn.Module, Call]:
    """Return the network and its call."""

    def make(activation: Callable[[], nn.Module]) -> nn.Sequential:
        options = {"stem": "cifar"} if args.model in RESNETS else {}
        return models.MODELS[args.model](activation, 3, CLASSES, (32, 32), **options)

    if name == RELU:
        net = make(nn.ReLU)
        return net, lambda images, steps: net(images).unsqueeze(0)
    if name == JELLY:
        jelly = Jelly(torch.device(args.device), DECAY, 1.0, sigmoid=False)
        jelly.constants |= {"v_reset": None, "detach_reset": True}
        net = make(partial(Function, args.T, jelly.precision))
        stem, rest = net[:2], net[2:]  # the stem is a convolution and a norm

        def call(images: Tensor, steps: int) -> Tensor:
            for module in net.modules():
                if isinstance(module, Function):
                    module.T = steps
            return rest(torch.cat([stem(images)] * steps)).unflatten(0, (steps, -1))

        return net, call
    surrogate = sf.surrogate.PiecewiseQuadratic(1.0)
    neuron = partial(sf.LIF, DECAY, surrogate=surrogate, reset="soft", detach_reset=True)
    # Memory is not scarce here, and unpacking bits takes time.
    temporal = sf.fuse(sf.Temporal(make(neuron), memory=sf.memory.SaveAll()))
    return temporal, lambda images, steps: temporal(direct(images, steps))


class ImageRun(Run):
    def make_network(self) -> nn.Module:
        net, self.call = make_network(self.name, self.args)
        self.mean, self.std = (
            255 * torch.tensor(values, device=self.device).view(3, 1, 1) for values in (MEAN, STD)
        )
        return net.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def make_optimizer(self) -> torch.optim.Optimizer:
        args, parameters = self.args, list(self.net.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": args.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        fused = self.device.type == "cuda"
        if args.optimizer == "adamw":
            return torch.optim.AdamW(groups, args.lr, fused=fused)
        return torch.optim.SGD(groups, args.lr, MOMENTUM, nesterov=True, fused=fused)

    def outputs(self, pixels: Tensor, steps: int) -> Tensor:
        """Return logits `[T, B, classes]` of bytes, or of their mixtures."""
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.call(self.normalized(pixels), steps)

    def normalized(self, pixels: Tensor) -> Tensor:
        images = (pixels.float() - self.mean) / self.std
        return images.contiguous(memory_format=torch.channels_last)

    def _step(self, pixels: Tensor, labels: Tensor, steps: int, last: str = PARTS[-1]) -> Tensor:
        args, targets = self.args, labels
        pixels = data.random_flip(data.random_shift(pixels, args.shift))
        if args.trivial_augment:
            pixels = data.trivial_augment(pixels)
        pixels = data.cutout(pixels, args.cutout)
        if args.cutmix:
            one_hot = targets.unsqueeze(1) == torch.arange(CLASSES, device=self.device)
            pixels, targets = data.cutmix(pixels, one_hot.float(), args.cutmix)
        if last == "augmentation":
            return pixels
        self.optimizer.zero_grad()
        logits = mean_logits(self.outputs(pixels, steps))
        loss = F.cross_entropy(logits, targets, label_smoothing=args.smoothing)
        if last == "forward":
            return loss.detach()
        loss.backward()
        if last == "optimizer":
            self.optimizer.step()
        return loss

    def measure(self) -> Record:
        """Return milliseconds per batch of each part of a step, and of evaluation."""
        self.net.train()
        milliseconds, before = {}, 0.0
        for last in PARTS:
            for _ in range(2):  # once to record the step
                synchronize(self.device)
                start = time.perf_counter()
                for batch in self.batches:
                    self.step(*batch, self.args.T, last)
                synchronize(self.device)
            until = 1000 * (time.perf_counter() - start) / len(self.batches)
            milliseconds[last], before = round(until - before, 4), until
        start = time.perf_counter()
        self.accuracy()  # ends with a synchronization
        batches = -(-len(self.testing) // EVAL_BATCH)
        milliseconds["evaluation"] = round(1000 * (time.perf_counter() - start) / batches, 4)
        pipeline = round(1000 * self.args.batch / milliseconds["augmentation"])
        return {"ms": milliseconds, "augmented_images_per_s": pipeline}


if __name__ == "__main__":
    main()
