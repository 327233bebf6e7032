"""All datasets by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from spikefuse.data import cifar, dvs_gesture, heidelberg, ncaltech101, speech_commands
from spikefuse.data.cifar import load_cifar10, load_cifar100, load_cifar100_coarse
from spikefuse.data.cifar10_dvs import find_cifar10_dvs, read_cifar10_dvs
from spikefuse.data.digits import load_digits
from spikefuse.data.dvs_gesture import find_dvs_gesture
from spikefuse.data.files import DataError, default_directory
from spikefuse.data.folder import (
    ENDINGS,
    MARGIN,
    MAX_CLASSES,
    TINY_CLASSES,
    load_imagenet,
    load_tiny_imagenet,
    read_image,
)
from spikefuse.data.frames import Frames, Slicing, to_frames
from spikefuse.data.heidelberg import SHD_CLASSES, SSC_CLASSES
from spikefuse.data.images import Examples
from spikefuse.data.mnist import load_fashion_mnist, load_mnist
from spikefuse.data.ncaltech101 import find_ncaltech101, read_ncaltech101
from spikefuse.data.nmnist import find_nmnist, read_nmnist
from spikefuse.data.recordings import Recording, RecordingSet
from spikefuse.data.sound import Sound, read_wav
from spikefuse.data.speech_commands import find_speech_commands
from spikefuse.data.store import load_frames

DIGITS = tuple("0123456789")
CLOTHES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


# Finds the training, perhaps validation, and test recordings in a folder.
Find = Callable[[Path], tuple[RecordingSet, ...]]
# Reads the recordings in a file.
Reader = Callable[[Path], Iterator[Recording | Sound]]
PARTS = {2: ("train", "test"), 3: ("train", "valid", "test")}


@dataclass(frozen=True)
class Dataset:
    """The description of a dataset, ours or a user's own.

    ```python
    def read(directory, download):
        train, test = torch.load(directory / "shapes.pt")  # (uint8 [N, 1, 16, 16], int64 [N])
        return Images(*train), Images(*test)

    shapes = Dataset((1, 16, 16), ("circle", "square"), read)
    ```

    Args:
        shape: shape of an image, (C, H, W), or of a frame, (P, H, W), or (W,) for audio.
        classes: name of each label.
        read: maps (directory, download, **transform) to (training examples, test examples), or to
            (training, validation, test), which are `Images`, `Frames` or other `Examples`.
            `DataError` reports missing files.
        kind: "images", which are encoded as sequences, or "events", which are sequences.
        transform: the options of `load` that this dataset takes, with their defaults; those of
            events include num_steps.
        files: of events, the ending of the files that `read_file` accepts, and their reader.
        scale: of events, a network's input is `scale` times the values of the frames.
    """

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    read: Callable[..., tuple[Examples, ...]]
    kind: Literal["images", "events"] = "images"
    transform: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, Reader] | None = None
    scale: float = 1.0


# Ending and reader of the files of each event dataset.
EVENT_FILES: dict[str, tuple[str, Reader]] = {
    "nmnist": (".bin", lambda path: iter([read_nmnist(path)])),
    "dvs_gesture": (".aedat", dvs_gesture.read_gestures),
    "cifar10_dvs": (".aedat", lambda path: iter([read_cifar10_dvs(path)])),
    "ncaltech101": (".bin", lambda path: iter([read_ncaltech101(path)])),
    "shd": (".h5", lambda path: heidelberg.recordings_in(path, len(SHD_CLASSES)).read()),
    "ssc": (".h5", lambda path: heidelberg.recordings_in(path, len(SSC_CLASSES)).read()),
    "speech_commands": (".wav", lambda path: iter([read_wav(path)])),
}


def _events(
    name: str,
    find: Find,
    size: tuple[int, ...],
    classes: tuple[str, ...],
    slicing: Slicing,
    scale: float = 1.0,
) -> Dataset:
    def read(directory: Path, download: bool, **options: Any) -> tuple[Frames, ...]:
        chosen, found = Slicing(**options), find(directory)
        parts = zip(PARTS[len(found)], found, strict=True)
        return tuple(load_frames(f"{name}-{part}", sets, chosen) for part, sets in parts)

    return Dataset(size, classes, read, "events", vars(slicing), EVENT_FILES[name], scale)


# T = 32 and SBE as in Li et al., "Towards Scalable GPU-Accelerated SNN Training via Temporal
# Fusion", section 5.2. No recording of speech is longer than 1.4 seconds.
SACCADES, GESTURES = Slicing("number", 32, bits=4), Slicing("number", 32, bits=8)
# The camera of N-Caltech101 is that of N-MNIST, whose counts stay below 16 in 10 steps.
OBJECTS = Slicing("number", 10, bits=4)
SCREEN, SPEECH = Slicing("number", 10, bits=8), Slicing("duration", 100, dt=14_000, bits=4)
# Frames of 25 ms begin every 10 ms, as is usual in speech recognition.
SPECTRA = Slicing("duration", 100, dt=10_000, bits=8)
CAMERA, IMAGE = (2, 128, 128), (3, 224, 224)
IMAGENET = tuple(f"class {i}" for i in range(MAX_CLASSES))

DATASETS: dict[str, Dataset] = {
    "digits": Dataset((1, 8, 8), DIGITS, load_digits),
    "mnist": Dataset((1, 28, 28), DIGITS, load_mnist),
    "fashion_mnist": Dataset((1, 28, 28), CLOTHES, load_fashion_mnist),
    "cifar10": Dataset(cifar.SHAPE, cifar.CLASSES, load_cifar10),
    "cifar100": Dataset(cifar.SHAPE, cifar.CLASSES100, load_cifar100),
    "cifar100_coarse": Dataset(cifar.SHAPE, tuple(cifar.SUPERCLASSES), load_cifar100_coarse),
    "imagenet": Dataset(IMAGE, IMAGENET, load_imagenet, transform={"size": 224}),
    "tiny_imagenet": Dataset(
        (3, 64, 64), IMAGENET[:TINY_CLASSES], load_tiny_imagenet, transform={"size": 64}
    ),
    "nmnist": _events("nmnist", find_nmnist, (2, 34, 34), DIGITS, SACCADES),
    "dvs_gesture": _events("dvs_gesture", find_dvs_gesture, CAMERA, dvs_gesture.CLASSES, GESTURES),
    "cifar10_dvs": _events("cifar10_dvs", find_cifar10_dvs, CAMERA, cifar.CLASSES, SCREEN),
    "ncaltech101": _events(
        "ncaltech101", find_ncaltech101, ncaltech101.SIZE, ncaltech101.CLASSES, OBJECTS
    ),
    "shd": _events("shd", heidelberg.find_shd, heidelberg.SIZE, SHD_CLASSES, SPEECH),
    "ssc": _events("ssc", heidelberg.find_ssc, heidelberg.SIZE, SSC_CLASSES, SPEECH),
    # Levels of sound are not events, but sequences of bytes that are cut and cached like them.
    "speech_commands": _events(
        "speech_commands",
        find_speech_commands,
        speech_commands.SIZE,
        speech_commands.CLASSES,
        SPECTRA,
        scale=1 / 255,
    ),
}


def load(
    name: str, directory: str | Path | None = None, download: bool = False, **transform: Any
) -> tuple[Examples, ...]:
    """Load the training and test examples of a dataset, and those for validation if it has any.

    Example::

        train, test = sf.data.load("digits")
        batch = train[:32]
        x, labels = sf.data.expand(batch), batch.labels  # [32, 1, 8, 8], from 0 to 1

    Args:
        name: one of `DATASETS`.
        directory: folder of the files and of downloads; by default `$SPIKEFUSE_DATA`, else `data/`
            of a source checkout of spikefuse if it exists, else a folder in the user's cache.
        download: download missing files and verify their checksums, for mnist, fashion_mnist,
            cifar10 and cifar100; for others, the error says where to get them.
        transform: options of the dataset: those of `Slicing` for events, `size` for imagenet and
            tiny_imagenet.

    Returns:
        (training, test), or of ssc and speech_commands (training, validation, test): `Images`,
        `ImageFolder`s or `Frames`. Frames are computed once and cached on disk.

    Raises:
        DataError: the dataset or an option is unknown, a file is missing or damaged, or the
            download failed.
    """
    options = _options(name, transform)
    folder = default_directory() if directory is None else Path(directory).expanduser()
    return DATASETS[name].read(folder, download, **options)


def read_file(name: str, path: str | Path, **transform: Any) -> Iterator[np.ndarray]:
    """Read the examples in one file, such as a user's own, in the form of a dataset.

    An image is scaled so that its shorter side fits and cropped at the centre, with the margin of
    `ImageFolder` for imagenet. Its colours are not inverted: digits in the datasets are bright on
    black. Event files must have the dataset's own format. A file of DVS128 Gesture is split into
    the gestures listed in the table beside it, `<stem>_labels.csv`; without one it is one gesture.

    Args:
        name: one of `DATASETS`.
        path: the file.
        transform: as for `load`.

    Returns:
        An iterator over uint8 images `[C, H, W]` or frames `[T, *shape]`.

    Raises:
        DataError: the dataset or an option is unknown, or the file is missing or damaged; some
            damage is found only when an example is read.
    """
    path, options = Path(path).expanduser(), _options(name, transform)
    if DATASETS[name].kind == "events":
        ending, read = _event_files(name)
        if path.suffix.lower() != ending:
            raise DataError(f"{path} is not a file of {name}: expected one that ends in {ending}")
        return map(partial(to_frames, slicing=Slicing(**options)), read(path))
    channels, size, width = (*DATASETS[name].shape, 0, 0)[:3]
    if channels not in (1, 3) or size != width:
        raise DataError(f"images of {name} are not square, in grey or RGB: convert {path} to bytes")
    margin = MARGIN if name == "imagenet" else 1.0
    return iter([read_image(path, options.get("size", size), channels, margin)])


def _event_files(name: str) -> tuple[str, Reader]:
    files = DATASETS[name].files
    if files is None:
        raise DataError(f"{name} has no reader of single files: set files in its Dataset")
    return files


def file_endings(name: str) -> set[str]:
    """Return the endings of the files that `read_file` expects, in lower case."""
    return {_event_files(name)[0]} if DATASETS[name].kind == "events" else ENDINGS


def _options(name: str, transform: dict[str, Any]) -> dict[str, Any]:
    """Check and complete the options of a dataset."""
    if name not in DATASETS:
        raise DataError(f"unknown dataset {name!r}: choose one of {', '.join(DATASETS)}")
    own = dict(DATASETS[name].transform)
    for option in transform:
        if option not in own:
            options = ", ".join(own) or "none"
            raise DataError(f"{name} has no option {option!r}: its options are {options}")
    if transform.get("by", own.get("by")) != own.get("by"):
        del own["dt"]  # it belongs to the default slicing
    return {**own, **transform}
