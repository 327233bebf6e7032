"""Arrays of HDF5 files, read by h5py in a process of its own (hdf5_file.py)."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import numpy as np

from spikefuse.data.files import check_regular, damaged, not_installed
from spikefuse.data.recordings import Columns

SECONDS = 60  # that reading one array may take; the HDF5 library never ends at some damaged files


def read_events(path: Path) -> Columns:
    """Read the columns of the events in a file, alone or in a group `events`.

    Raises:
        DataError: the file is missing or damaged, has no such columns, or h5py is not installed.
    """
    check_regular(path)
    with contextlib.closing(arrays(path, "events")) as columns:
        x, y, p, t = columns
    if len({len(column) for column in (x, y, p, t)}) > 1:
        raise damaged(path, f"{len(x)} x, {len(y)} y, {len(p)} p, {len(t)} t")
    return x, y, p, t


def arrays(path: Path, kind: str) -> Generator[np.ndarray]:
    """Yield the arrays of a file.

    Args:
        kind: "speech" for labels, then times and units of each recording of the Heidelberg data
            sets; "events" for x, y, p and t.

    Raises:
        DataError: the program failed, crashed, or read one array for `SECONDS`.
    """
    if importlib.util.find_spec("h5py") is None:
        raise not_installed(path.name, "h5py", "events")
    program = Path(__file__).with_name("hdf5_file.py")
    # -P: modules beside the program must not hide others of the same name.
    command = [sys.executable, "-P", str(program), kind, str(path), str(SECONDS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        try:
            while len(header := process.stdout.read(8)) == 8:
                size = 8 * int.from_bytes(header, "little")
                if len(content := process.stdout.read(size)) < size:
                    break
                yield np.frombuffer(content)
            if code := process.wait():
                timed_out = code == -getattr(signal, "SIGALRM", 0)
                limit = f"an array takes more than {SECONDS} seconds"
                cause = limit if timed_out else "the HDF5 library crashes"
                *_, reason = [cause, *process.stderr.read().decode().splitlines()]
                raise damaged(path, reason)
        finally:
            process.kill()
