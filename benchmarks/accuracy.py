"""Accuracy over training time on CIFAR-10: spikefuse, SpikingJelly and ReLU in the same network.

    python -m benchmarks.accuracy --epochs 90 --seeds 0 1 2
    python -m benchmarks.accuracy --epochs 90 --checkpoints /tmp/accuracy --seconds 540

CIFAR-10 is read as JPEG copies from `cifar10/cifar10_{train,test}_jpeg.npz` in the data folder,
which are lossy: accuracies are close to those on the original images, but not the same. All
networks are `sew_resnet18` for small images, or another of our ResNets, with the same weights at
the start, batches, augmentation and schedule: SGD with Nesterov momentum, a one-cycle learning
rate, label smoothing, bfloat16 and channels-last. The images are on the device as bytes.

A spiking network runs T steps of LIF neurons on the same image, with soft resets without gradients
and a triangular surrogate. Its first epochs may train one step (`--early`), which takes a fraction
of the time; evaluation is always on T steps. Both kinds compute the layers before the first neuron
once for all steps. SpikingJelly's neurons are its function with a float32 state, its fastest path,
on the folded tensor. The ReLU network sees the image once. Each step is recorded as a CUDA graph
where it can be.

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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import layers, plots, runner
from benchmarks.networks import cudnn_search
from benchmarks.runner import Record, synchronize
from spikefuse import data, models
from spikefuse.data import Images
from spikefuse.data.files import default_directory, replacing
from spikefuse.nn.encode import direct
from spikefuse.train.batches import EvalBatches, TrainBatches
from spikefuse.train.optimize import readout, sequence_loss
from spikefuse.train.seeding import Purpose, reseed

OURS, JELLY, RELU = NAMES = (layers.OURS, "spikingjelly", "relu")
MODELS = ("sew_resnet18", "sew_resnet34", "ms_resnet18", "ms_resnet34", "resnet18", "resnet34")
# From images `[B, ...]` and a number of time steps T to logits `[T, B, classes]`.
Call = Callable[[Tensor, int], Tensor]
DECAY = 0.5
CLASSES, MEAN, STD = 10, (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
MOMENTUM, EVAL_BATCH = 0.9, 1000
QUICK = {"epochs": 2, "batch": 8, "T": 2}
# Options that change no row.
PLACES = ("checkpoints", "data_dir", "name", "names", "rounds", "seconds", "seeds")
# Parts of a training step. A step that ends after one of them has run those before it too.
PARTS = ("augmentation", "forward", "backward", "optimizer")


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("accuracy", __doc__)
    add = parser.add_argument
    add("--names", nargs="+", default=list(NAMES), choices=NAMES, help="networks (all)")
    add("--seeds", type=int, nargs="+", default=[0], help="(0)")
    add("--model", default=MODELS[0], choices=MODELS, help=f"({MODELS[0]})")
    add("--T", type=int, default=4, help="time steps (4)")
    add("--epochs", type=int, default=60, help="of the schedule (60)")
    add("--early", type=int, default=0, help="first epochs that train one time step only (0)")
    add("--batch", type=int, default=500, help="(500)")
    add("--lr", type=float, default=0.2, help="highest learning rate (0.2)")
    add("--rise", type=float, default=0.2, help="share of the run before it (0.2)")
    add("--weight-decay", type=float, default=5e-4, help="of weights, not of norms (5e-4)")
    add("--smoothing", type=float, default=0.1, help="of labels (0.1)")
    add("--shift", type=int, default=4, help="pixels (4)")
    add("--cutout", type=int, default=16, help="side in pixels (16)")
    add("--cutmix", type=float, default=0.0, help="alpha, 0 for none (0)")
    add("--seconds", type=float, help="stop before this time, evaluation included")
    add("--checkpoints", type=Path, help="folder of checkpoints, to continue from")
    add("--data-dir", type=Path, default=default_directory(), help="data folder")
    add("--name", help="name of the result (accuracy)")
    args = runner.parse(parser, argv)
    if args.quick:
        vars(args).update(QUICK)
    if args.seconds is not None and args.checkpoints is None:
        parser.error("--seconds needs --checkpoints, to continue from")
    settings = {k: v for k, v in runner.settings_of(args).items() if k not in PLACES}
    args.name = args.name or "accuracy"
    settings["data"] = "random images" if args.quick else "CIFAR-10, JPEG copies"
    with cudnn_search(torch.device(args.device)):
        left_out: list[Record] = []
        profile: Record = {}
        found = rows(args, settings, left_out, profile)
        given = settings | {"profile": profile}
        return runner.write_rows(args, found, describe, given, left_out, plots.accuracy)


def describe(row: Record) -> str:
    speed = f"{row['images_per_s']:,} images/s"
    what = f"{row['name']}, seed {row['seed']}, epoch {row['epoch']}"
    return f"{what}: {row['accuracy']:.2%}, loss {row['loss']:.3f}, {row['seconds']:.1f} s, {speed}"


def rows(
    args: argparse.Namespace, settings: Record, left_out: list[Record], profile: Record
) -> Iterator[Record]:
    device, started, longest = torch.device(args.device), time.perf_counter(), 0.0
    if args.quick:
        drawn = np.random.default_rng(0).integers(256, size=(10, 3, 16, 16), dtype=np.uint8)
        training = testing = Images(torch.from_numpy(drawn), torch.arange(10)).to(device)
    else:
        paths = (args.data_dir / "cifar10" / f"cifar10_{p}_jpeg.npz" for p in ("train", "test"))
        training, testing = (decode(path).to(device) for path in paths)
    for seed in args.seeds:
        for name in args.names:
            try:
                run = Run(name, seed, args, training)
            except Exception as error:  # the others are still trained
                left_out.append({"row": name, "reason": runner.first_line(error)})
                print(f"{name}: left out, {left_out[-1]['reason']}", flush=True)
                continue
            yield from run.load(settings)
            while len(run.rows) < args.epochs:
                begun = time.perf_counter()
                if args.seconds is not None and begun + longest > started + args.seconds:
                    return
                run.rows.append(run.train() | {"accuracy": run.accuracy(testing)})
                longest = max(longest, time.perf_counter() - begun)
                run.save(settings)
                yield run.rows[-1]
            if not run.profile:
                run.profile = run.measure(testing)
                run.save(settings)
            profile[f"{name}, seed {seed}"] = run.profile
            del run
            runner.release(device)


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
        return models.MODELS[args.model](activation, 3, CLASSES, (32, 32), stem="cifar")

    if name == RELU:
        net = make(nn.ReLU)
        return net, lambda images, steps: net(images).unsqueeze(0)
    if name == JELLY:
        jelly = layers.Jelly(torch.device(args.device), DECAY, 1.0, sigmoid=False)
        jelly.constants |= {"v_reset": None, "detach_reset": True}
        net = make(partial(layers.JellyFunction, args.T, jelly.function))
        stem, rest = net[:2], net[2:]  # the stem is a convolution and a norm

        def call(images: Tensor, steps: int) -> Tensor:
            for module in net.modules():
                if isinstance(module, layers.JellyFunction):
                    module.T = steps
            return rest(torch.cat([stem(images)] * steps)).unflatten(0, (steps, -1))

        return net, call
    surrogate = sf.surrogate.PiecewiseQuadratic(1.0)
    neuron = partial(sf.LIF, DECAY, surrogate=surrogate, reset="soft", detach_reset=True)
    temporal = sf.fuse(sf.Temporal(make(neuron)))
    return temporal, lambda images, steps: temporal(direct(images, steps))


class Run:
    """The training of one network: its state, and a step that a CUDA graph can hold."""

    def __init__(self, name: str, seed: int, args: argparse.Namespace, training: Images) -> None:
        self.args, self.name, self.seed, self.device = args, name, seed, torch.device(args.device)
        self.rows: list[Record] = []  # one per epoch
        self.profile: Record = {}  # after the last one
        self.batches = TrainBatches(training, args.batch, seed, self.steps_done, self.device)
        reseed(seed, Purpose.WEIGHTS)
        self.net, self.call = make_network(name, args)
        self.net.to(self.device, memory_format=torch.channels_last)
        self.mean, self.std = (
            255 * torch.tensor(values, device=self.device).view(3, 1, 1) for values in (MEAN, STD)
        )
        parameters = list(self.net.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": args.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.SGD(
            groups, args.lr, MOMENTUM, nesterov=True, fused=self.device.type == "cuda"
        )
        steps = args.epochs * len(self.batches)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, args.lr, steps, pct_start=args.rise, cycle_momentum=False
        )
        self.parts = {"net": self.net, "optimizer": self.optimizer, "schedule": self.schedule}
        self.step = sf.graph_step(self._step, fallback=True)

    def steps_done(self) -> int:
        return len(self.rows) * len(self.batches)

    def outputs(self, pixels: Tensor, steps: int) -> Tensor:
        """Return logits `[T, B, classes]` of bytes, or of their mixtures."""
        images = (pixels.float() - self.mean) / self.std
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.call(images.contiguous(memory_format=torch.channels_last), steps)

    def _step(self, pixels: Tensor, labels: Tensor, steps: int, last: str = PARTS[-1]) -> Tensor:
        args, targets = self.args, labels
        pixels = data.random_flip(data.random_shift(pixels, args.shift))
        pixels = data.cutout(pixels, args.cutout)
        if args.cutmix:
            one_hot = targets.unsqueeze(1) == torch.arange(CLASSES, device=self.device)
            pixels, targets = data.cutmix(pixels, one_hot.float(), args.cutmix)
        if last == "augmentation":
            return pixels
        self.optimizer.zero_grad()
        loss = sequence_loss(self.outputs(pixels, steps), targets, "mean", args.smoothing)
        if last == "forward":
            return loss.detach()
        loss.backward()
        if last == "optimizer":
            self.optimizer.step()
        return loss

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
            "images_per_s": round(num * self.args.batch / seconds),
            "graph": self.step.num_replays > 0,
        }

    @torch.no_grad()
    def accuracy(self, testing: Images) -> float:
        self.net.eval()
        batches = EvalBatches(testing, EVAL_BATCH, self.device)
        right = [
            (readout(self.outputs(x, self.args.T), "mean").argmax(1) == y).sum() for x, y in batches
        ]
        return int(torch.stack(right).sum()) / len(testing)

    def measure(self, testing: Images) -> Record:
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
        self.accuracy(testing)  # ends with a synchronization
        batches = -(-len(testing) // EVAL_BATCH)
        milliseconds["evaluation"] = round(1000 * (time.perf_counter() - start) / batches, 4)
        pipeline = round(1000 * self.args.batch / milliseconds["augmentation"])
        return {"ms": milliseconds, "augmented_images_per_s": pipeline}

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
            self.rows, self.profile = found["rows"], found.get("profile", {})
        return self.rows


if __name__ == "__main__":
    main()
