"""Data sets: readers over local files, and downloads with checksums."""

from spikefuse.data.errors import DataError
from spikefuse.data.idx import read_idx
from spikefuse.data.images import Images, split
from spikefuse.data.registry import DATASETS, Dataset, load

__all__ = ["DATASETS", "DataError", "Dataset", "Images", "load", "read_idx", "split"]
