"""Read a file of events by faery, in the process of spikefuse/isolated.py."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import faery
import numpy as np

# Type of a file by its ending.
TYPES = {".aedat": "aedat", ".aedat4": "aedat", ".raw": "evt", ".dat": "dat", ".es": "es"}
UNKNOWN = (1 << 14, 1 << 14)  # more than the coordinates of a format that may omit the sensor


def read(path: str) -> Iterator[np.ndarray]:
    """Yield columns and rows of the sensor, or nothing where the file doesn't tell, then packets
    of events as bytes."""
    kind = TYPES[Path(path).suffix.lower()]
    stream = faery.events_stream_from_file(path, dimensions_fallback=UNKNOWN, file_type=kind)
    sensor = stream.dimensions()
    yield np.array([] if sensor == UNKNOWN else sensor, np.int64)
    packets = iter(stream)
    while several := list(islice(packets, 16)):  # of AEDAT 4, a packet has a few thousand events
        yield np.concatenate(several).view(np.uint8)
