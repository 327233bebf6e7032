"""What the command prints, to terminals, pipes that may be closed, and disks that may be full."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Iterable
from typing import Any

try:
    from tqdm import tqdm
except ModuleNotFoundError:  # predictions need no progress bar
    tqdm = None


def write(text: str, file: Any = None, end: str = "\n") -> None:
    """Print above a progress bar, if there is one."""
    if tqdm is None:
        print(text, file=file, end=end)
    else:
        tqdm.write(text, file=file, end=end)


def progress(items: Any, description: str, visible: bool = True) -> Iterable[Any]:
    """Show a progress bar over several files or batches, on terminals only."""
    if tqdm is None or len(items) < 2 or not visible:
        return items
    return tqdm(items, description, disable=None, leave=False)


def show(text: str) -> None:
    """Print lines of a run, which continues if the pipe is closed or the disk is full."""
    with contextlib.suppress(OSError):
        write(text)
    flush()


def complain(text: str) -> None:
    """Print an error."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def open_closed_streams() -> None:
    """Send the standard streams that the shell has closed nowhere; let others print any name.

    Names of files may be any bytes: those that are not UTF-8 are printed as they are.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")


def flush() -> None:
    """Flush standard output; if that fails, send it nowhere from now on."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
