"""The folder of cached kernels, which runs as code: private to the user, checked before it is used.

Generated source and Numba's machine code lie in `kernels` below the cache directory. Whoever can
write there can run code as the user, so a folder or file that others own or can write is refused.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

ENVIRONMENT = "SPIKEFUSE_CACHE_DIR"
FIX = f"set {ENVIRONMENT} to a folder"

_checked: set[Path] = set()


def directory() -> Path:
    """Return $SPIKEFUSE_CACHE_DIR/kernels, else spikefuse/kernels in the user's cache."""
    chosen = os.environ.get(ENVIRONMENT)
    if chosen:
        return Path(chosen).expanduser() / "kernels"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "spikefuse" / "kernels"


def private_directory() -> Path:
    """Return `directory()`, made if it does not exist, readable by the user only.

    Raises:
        OSError: it cannot be made, or another user owns or can write it or a file in it.
    """
    folder = directory()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if os.name == "posix" and folder not in _checked:
            _check(folder)
            _checked.add(folder)
    except OSError as error:
        if isinstance(error, ForeignFile):
            raise
        raise OSError(
            f"can't write generated kernels to {folder}: {error.strerror}; {FIX} that can be "
            "written"
        ) from error
    return folder


class ForeignFile(PermissionError):
    """A folder or file of the cache belongs to another user, or another user can write it."""


def _check(folder: Path) -> None:
    status = folder.stat()
    _refuse(folder, status, stat.S_IWGRP | stat.S_IWOTH)
    # Where others cannot enter, the modes of files are without effect.
    is_private = not status.st_mode & 0o077
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            try:
                found = path.lstat()
            except FileNotFoundError:
                continue  # a temporary file of another process
            _refuse(path, found, 0 if is_private else stat.S_IWGRP | stat.S_IWOTH)
    if not is_private and status.st_uid == os.geteuid():
        folder.chmod(0o700)


def _refuse(path: Path, status: os.stat_result, forbidden: int) -> None:
    """Raise if another user than root owns a file, or if it has one of the forbidden modes."""
    if status.st_uid not in (os.geteuid(), 0):
        raise ForeignFile(
            f"the cached kernels in {path} belong to user {status.st_uid}, who could run code as "
            f"you: {FIX} of your own"
        )
    if status.st_mode & forbidden and not stat.S_ISLNK(status.st_mode):
        raise ForeignFile(
            f"other users can write {path} and so run code as you (mode "
            f"{stat.S_IMODE(status.st_mode):o}): delete it, or {FIX} of your own"
        )
