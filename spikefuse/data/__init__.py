"""Data sets: readers over local files, event-to-frame transforms, downloads with checksums."""

from spikefuse.data.augment import random_flip, random_shift
from spikefuse.data.errors import DataError
from spikefuse.data.events import Events
from spikefuse.data.folder import ImageFolder
from spikefuse.data.frames import Frames, Slicing, expand, to_frames
from spikefuse.data.idx import read_idx
from spikefuse.data.images import Examples, Images, Subset, split
from spikefuse.data.registry import DATASETS, Dataset, load

__all__ = [
    "DATASETS",
    "DataError",
    "Dataset",
    "Events",
    "Examples",
    "Frames",
    "ImageFolder",
    "Images",
    "Slicing",
    "Subset",
    "expand",
    "load",
    "random_flip",
    "random_shift",
    "read_idx",
    "split",
    "to_frames",
]
