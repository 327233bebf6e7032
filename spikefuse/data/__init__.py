"""Datasets: readers of local files, event-to-frame transforms, downloads with checksums."""

from spikefuse.data.augment import (
    cutmix,
    cutout,
    drop_events,
    mixup,
    random_erasing,
    random_flip,
    random_shift,
)
from spikefuse.data.dataset import Dataset
from spikefuse.data.files import DataError
from spikefuse.data.folder import ImageFolder, image_folder
from spikefuse.data.frames import Frames, Slicing, expand, time_surface, to_frames, voxel_grid
from spikefuse.data.images import Examples, Images, Series, Subset, split
from spikefuse.data.mnist import read_idx
from spikefuse.data.recording_folder import event_folder
from spikefuse.data.recordings import Recording
from spikefuse.data.registry import DATASETS, load, read_file
from spikefuse.data.sound import Sound, log_mel
from spikefuse.data.trivial_augment import trivial_augment

__all__ = [
    "DATASETS",
    "DataError",
    "Dataset",
    "Examples",
    "Frames",
    "ImageFolder",
    "Images",
    "Recording",
    "Series",
    "Slicing",
    "Sound",
    "Subset",
    "cutmix",
    "cutout",
    "drop_events",
    "event_folder",
    "expand",
    "image_folder",
    "load",
    "log_mel",
    "mixup",
    "random_erasing",
    "random_flip",
    "random_shift",
    "read_file",
    "read_idx",
    "split",
    "time_surface",
    "to_frames",
    "trivial_augment",
    "voxel_grid",
]
