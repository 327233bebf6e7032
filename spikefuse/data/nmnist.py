"""N-MNIST and N-Caltech101: recordings of the images of MNIST and Caltech101 by a moving camera.

Orchard, Jayawant, Cohen, Thakor, "Converting Static Image Datasets to Spiking Neuromorphic
Datasets Using Saccades", Frontiers in Neuroscience 9:437, 2015.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from spikefuse.data.event_files import read_saccades
from spikefuse.data.files import DataError, class_files, find_folder
from spikefuse.data.recordings import Recording, RecordingSet, make_recording

PAGE = "https://www.garrickorchard.com/datasets/n-mnist"
SIZE = (2, 34, 34)

CALTECH_PAGE = "https://www.garrickorchard.com/datasets/n-caltech101"
# The largest images; smaller ones begin in the upper left corner.
CALTECH_SIZE = (2, 180, 240)
# 100 classes and one of other images. The class "Faces" of Caltech101 is left out, as published.
CALTECH_CLASSES = (
    *("BACKGROUND_Google", "Faces_easy", "Leopards", "Motorbikes", "accordion", "airplanes"),
    *("anchor", "ant", "barrel", "bass", "beaver", "binocular", "bonsai", "brain"),
    *("brontosaurus", "buddha", "butterfly", "camera", "cannon", "car_side", "ceiling_fan"),
    *("cellphone", "chair", "chandelier", "cougar_body", "cougar_face", "crab", "crayfish"),
    *("crocodile", "crocodile_head", "cup", "dalmatian", "dollar_bill", "dolphin", "dragonfly"),
    *("electric_guitar", "elephant", "emu", "euphonium", "ewer", "ferry", "flamingo"),
    *("flamingo_head", "garfield", "gerenuk", "gramophone", "grand_piano", "hawksbill"),
    *("headphone", "hedgehog", "helicopter", "ibis", "inline_skate", "joshua_tree", "kangaroo"),
    *("ketch", "lamp", "laptop", "llama", "lobster", "lotus", "mandolin", "mayfly", "menorah"),
    *("metronome", "minaret", "nautilus", "octopus", "okapi", "pagoda", "panda", "pigeon"),
    *("pizza", "platypus", "pyramid", "revolver", "rhino", "rooster", "saxophone", "schooner"),
    *("scissors", "scorpion", "sea_horse", "snoopy", "soccer_ball", "stapler", "starfish"),
    *("stegosaurus", "stop_sign", "strawberry", "sunflower", "tick", "trilobite", "umbrella"),
    *("watch", "water_lilly", "wheelchair", "wild_cat", "windsor_chair", "wrench", "yin_yang"),
)
TRAIN_SHARE = 0.9  # of each class, at its beginning


def find_nmnist(directory: Path) -> tuple[RecordingSet, RecordingSet]:
    """Find training and test recordings in the folders Train and Test with ten subfolders each."""
    folder = find_folder("nmnist", ("Train", "Test"), directory, PAGE)
    return _recordings(folder / "Train"), _recordings(folder / "Test")


def _recordings(folder: Path) -> RecordingSet:
    how = f"get {folder.name}.zip from {PAGE} and unpack it to {folder}"
    files = class_files(folder, "0123456789", {".bin"}, how)
    return RecordingSet.of_files(SIZE, files, read_nmnist)


def read_nmnist(path: Path, size: tuple[int, int, int] = SIZE) -> Recording:
    """Read one .bin file, of N-MNIST or with the `size` of another sensor."""
    return make_recording(read_saccades(path), size, path)


read_ncaltech101 = partial(read_nmnist, size=CALTECH_SIZE)


def find_ncaltech101(directory: Path) -> tuple[RecordingSet, ...]:
    """Find training and test recordings in one folder of .bin files per class.

    The dataset has no test set. As SpikingJelly's `split_to_train_test_set(0.9, ...)` does without
    shuffling, the first nine tenths of each class, rounded down, are used for training.

    Raises:
        DataError: a folder is missing, or has fewer than two .bin files.
    """
    folder = find_folder("ncaltech101", CALTECH_CLASSES, directory, CALTECH_PAGE, "Caltech101")
    how = f"get the dataset from {CALTECH_PAGE} and unpack it there"
    files = class_files(folder, CALTECH_CLASSES, {".bin"}, how)
    counts = np.bincount(files.labels)
    if counts.min() < 2:
        name = CALTECH_CLASSES[counts.argmin()]
        raise DataError(f"ncaltech101: {folder / name} has one recording, expected two: {how}")
    place = np.arange(len(files.labels)) - np.repeat(counts.cumsum() - counts, counts)
    is_training = place < (TRAIN_SHARE * counts).astype(int)[files.labels]
    return tuple(
        RecordingSet.of_files(CALTECH_SIZE, files.rows(chosen), read_ncaltech101)
        for chosen in (is_training, ~is_training)
    )
