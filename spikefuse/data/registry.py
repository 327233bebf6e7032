"""All datasets by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spikefuse.data import cifar, dvs_gesture, heidelberg, nmnist, speech_commands
from spikefuse.data.cifar import load_cifar10, load_cifar100, load_cifar100_coarse
from spikefuse.data.cifar10_dvs import find_cifar10_dvs, read_cifar10_dvs
from spikefuse.data.dataset import Dataset, Reader
from spikefuse.data.digits import load_digits
from spikefuse.data.dvs_gesture import find_dvs_gesture
from spikefuse.data.files import DataError, default_directory
from spikefuse.data.folder import (
    ENDINGS,
    MARGIN,
    image_folder,
    imagenet,
    read_image,
    tiny_imagenet,
)
from spikefuse.data.frames import Frames, Slicing, to_frames
from spikefuse.data.heidelberg import SHD_CLASSES, SSC_CLASSES
from spikefuse.data.images import Examples
from spikefuse.data.mnist import load_fashion_mnist, load_mnist
from spikefuse.data.nmnist import find_ncaltech101, find_nmnist, read_ncaltech101, read_nmnist
from spikefuse.data.recording_folder import FILES, event_folder
from spikefuse.data.recordings import RecordingSet
from spikefuse.data.sound import read_wav
from spikefuse.data.speech_commands import find_speech_commands
from spikefuse.data.store import load_parts

DIGITS = tuple("0123456789")
CLOTHES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


SLICING = [field.name for field in fields(Slicing)]


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


def _described(
    describe: Callable[..., Dataset], shape: tuple[int, ...], num_classes: int = 0, **options: Any
) -> Dataset:
    """Return a dataset of which `describe` finds the shape and the classes in the files."""

    def read(directory: Path, download: bool, **options: Any) -> tuple[Examples, ...]:
        return load(describe(directory, **options), directory, download)

    # Checkpoints of earlier versions lack the classes.
    classes = tuple(f"class {i}" for i in range(num_classes))
    return Dataset(shape, classes, read, transform=options, describe=describe)


def _events(
    name: str,
    find: Callable[[Path], tuple[RecordingSet, ...]],
    size: tuple[int, ...],
    classes: tuple[str, ...],
    slicing: Slicing,
    scale: float = 1.0,
) -> Dataset:
    def read(directory: Path, download: bool, **options: Any) -> tuple[Frames, ...]:
        return load_parts(name, find(directory), Slicing(**options))

    return Dataset(size, classes, read, "events", vars(slicing), EVENT_FILES[name], scale)


# T = 32 and SBE as in Li et al., "Towards Scalable GPU-Accelerated SNN Training via Temporal
# Fusion", section 5.2. No recording of speech is longer than 1.4 seconds.
SACCADES, GESTURES = Slicing("number", 32, bits=4), Slicing("number", 32, bits=8)
# The camera of N-Caltech101 is that of N-MNIST, whose counts stay below 16 in 10 steps.
OBJECTS = Slicing("number", 10, bits=4)
SCREEN, SPEECH = Slicing("number", 10, bits=8), Slicing("duration", 100, dt=14_000, bits=4)
# Frames of 25 ms begin every 10 ms, as is usual in speech recognition.
SPECTRA = Slicing("duration", 100, dt=10_000, bits=8)
CAMERA = (2, 128, 128)

DATASETS: dict[str, Dataset] = {
    "digits": Dataset((1, 8, 8), DIGITS, load_digits),
    "mnist": Dataset((1, 28, 28), DIGITS, load_mnist),
    "fashion_mnist": Dataset((1, 28, 28), CLOTHES, load_fashion_mnist),
    "cifar10": Dataset(cifar.SHAPE, cifar.CLASSES, load_cifar10),
    "cifar100": Dataset(cifar.SHAPE, cifar.CLASSES100, load_cifar100),
    "cifar100_coarse": Dataset(cifar.SHAPE, tuple(cifar.SUPERCLASSES), load_cifar100_coarse),
    "imagenet": _described(imagenet, (3, 224, 224), 1000, size=224, grey=False, margin=MARGIN),
    "tiny_imagenet": _described(tiny_imagenet, (3, 64, 64), 200, size=64, grey=False, margin=1.0),
    "folder": _described(image_folder, (3, 64, 64), size=64, grey=False, margin=1.0, seed=0),
    "nmnist": _events("nmnist", find_nmnist, nmnist.SIZE, DIGITS, SACCADES),
    "dvs_gesture": _events("dvs_gesture", find_dvs_gesture, CAMERA, dvs_gesture.CLASSES, GESTURES),
    "cifar10_dvs": _events("cifar10_dvs", find_cifar10_dvs, CAMERA, cifar.CLASSES, SCREEN),
    "ncaltech101": _events(
        "ncaltech101", find_ncaltech101, nmnist.CALTECH_SIZE, nmnist.CALTECH_CLASSES, OBJECTS
    ),
    "events": replace(
        _described(event_folder, CAMERA, **vars(Slicing()), sensor=None, size=None, seed=0),
        kind="events",
        files=FILES,
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


# Datasets of a user's own files, which are in no default folder.
OWN = ("folder", "events")


def load(
    dataset: str | Dataset,
    directory: str | Path | None = None,
    download: bool = False,
    **transform: Any,
) -> tuple[Examples, ...]:
    """Load the training and test examples of a dataset, and those for validation if it has any.

    Example::

        train, test = sf.data.load("digits")
        batch = train[:32]
        x, labels = sf.data.expand(batch), batch.labels  # [32, 1, 8, 8], from 0 to 1

    Args:
        dataset: one of `DATASETS`, or a description, such as that of `image_folder`.
        directory: folder of the files and of downloads; by default `$SPIKEFUSE_DATA`, else `data/`
            of a source checkout of spikefuse if it exists, else a folder in the user's cache.
        download: download missing files and verify their checksums, for mnist, fashion_mnist,
            cifar10 and cifar100; for others, the error says where to get them.
        transform: options of the dataset: those of `Slicing` for events, those of `image_folder`
            for folder, imagenet and tiny_imagenet.

    Returns:
        (training, test), or for some datasets (training, validation, test): `Images`,
        `ImageFolder`s or `Frames`. Frames are computed once and cached on disk.

    Raises:
        DataError: the dataset or an option is unknown, a file is missing or damaged, or the
            download failed.
    """
    found = _find(dataset, transform)
    directory = _directory(dataset, directory)
    names = "directory", "download"
    _check_takes(f"the read of {found.name}", found.read, names, found.transform)
    return found.read(directory, download, **found.transform)


def describe(name: str, directory: str | Path | None = None, **transform: Any) -> Dataset:
    """Return the description of a dataset, with the shape and the classes of the files.

    Args:
        name, directory, transform: as for `load`; the description has these options.

    Raises:
        DataError: as for `load`.
    """
    found = _find(name, transform)
    if found.describe is None:
        return found
    directory = _directory(name, directory)
    what = f"the describe of {found.name}"
    _check_takes(what, found.describe, ("directory",), found.transform)
    return found.describe(directory, **found.transform)


def read_file(dataset: str | Dataset, path: str | Path, **transform: Any) -> Iterator[np.ndarray]:
    """Read the examples in one file, such as a user's own, in the form of a dataset.

    An image is scaled so that its shorter side fits and cropped at the centre, with the margin of
    `ImageFolder` for imagenet. Its colours are not inverted: digits in the datasets are bright on
    black. Event files must have the dataset's own format. A file of DVS128 Gesture is split into
    the gestures listed in the table beside it, `<stem>_labels.csv`; without one it is one gesture.

    Example::

        (image,) = sf.data.read_file("mnist", "three.png")  # uint8 [1, 28, 28]
        frames = [*sf.data.read_file("nmnist", "recording.bin", num_steps=16)]

    Args:
        dataset: one of `DATASETS`, or a description.
        path: the file.
        transform: as for `load`.

    Returns:
        An iterator over uint8 images `[C, H, W]` or frames `[T, *shape]`, or float32 series.

    Raises:
        DataError: the dataset or an option is unknown, or the file is missing or damaged; some
            damage is found only when an example is read.
    """
    path, found = Path(path).expanduser(), _find(dataset, transform)
    options = dict(found.transform)
    if found.kind != "images":
        endings, read = _event_files(found)
        if path.suffix.lower() not in endings:
            ending = " or ".join(endings)
            raise DataError(
                f"{path} is not a file of {found.name}: expected one that ends in {ending}"
            )
        convert: Callable[[Any], np.ndarray]
        if found.kind == "series":
            convert = partial(_checked, path, (options["num_steps"], *found.shape))
        else:
            slicing = Slicing(**{name: options.pop(name) for name in SLICING if name in options})
            convert = partial(to_frames, slicing=slicing)
        _check_takes(f"the reader of files of {found.name}", read, ("path",), options)
        return map(convert, read(path, **options))
    channels, size, width = (*found.shape, 0, 0)[:3]
    if channels not in (1, 3) or size != width:
        raise DataError(
            f"images of {found.name} are not square, in grey or RGB: convert {path} to bytes"
        )
    size, channels = options.get("size", size), 1 if options.get("grey") else channels
    return iter([read_image(path, size, channels, options.get("margin", 1.0))])


def _check_takes(
    what: str, function: Any, arguments: tuple[str, ...], options: Mapping[str, Any]
) -> None:
    """Raise DataError unless a function of a dataset takes these arguments and options."""
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        shown = ", ".join((*arguments, *(f"{name}={value!r}" for name, value in options.items())))
        raise DataError(
            f"{what} is called with ({shown}), which it does not take ({error}): let it take the "
            "options in transform"
        ) from error
    except ValueError:  # of a function without a signature, such as one written in C
        pass


def _checked(path: Path, shape: tuple[int, ...], series: np.ndarray) -> np.ndarray:
    if series.dtype != np.float32 or series.shape != shape:
        raise DataError(
            f"{path} holds {series.dtype} {list(series.shape)}: expected float32 {list(shape)}"
        )
    if not np.isfinite(series).all():
        raise DataError(f"{path} holds values that are not finite: replace NaN and infinity")
    return series


def _event_files(dataset: Dataset) -> tuple[tuple[str, ...], Reader]:
    if dataset.files is None:
        raise DataError(f"{dataset.name} has no reader of single files: set files in its Dataset")
    endings, read = dataset.files
    return ((endings,) if isinstance(endings, str) else endings), read


def file_endings(dataset: Dataset) -> Collection[str]:
    """Return the endings of the files that `read_file` expects, in lower case."""
    return ENDINGS if dataset.kind == "images" else _event_files(dataset)[0]


def _directory(dataset: str | Dataset, directory: str | Path | None) -> Path:
    if directory is not None:
        return Path(directory).expanduser()
    if dataset in OWN:
        raise DataError(f"{dataset} is a dataset of your own files: set data_dir to their folder")
    return default_directory()


def _find(dataset: str | Dataset, transform: dict[str, Any]) -> Dataset:
    """Return the description of a dataset, with its name and all options, which are checked."""
    if isinstance(dataset, str):
        if dataset not in DATASETS:
            raise DataError(
                f"unknown dataset {dataset!r}: choose one of {', '.join(DATASETS)}, or for a "
                "folder of your own spikefuse.data.image_folder"
            )
        dataset = replace(DATASETS[dataset], name=dataset)
    elif not isinstance(dataset, Dataset):
        raise TypeError(f"dataset is a {type(dataset).__name__}: expected a name or a Dataset")
    own = dict(dataset.transform)
    for option in transform:
        if option not in own:
            options = ", ".join(own) or "none"
            raise DataError(f"{dataset.name} has no option {option!r}: its options are {options}")
    if transform.get("by", own.get("by")) != own.get("by"):
        own |= {"dt": None, "count": None}  # they belong to the default slicing
    return replace(dataset, transform={**own, **transform})
