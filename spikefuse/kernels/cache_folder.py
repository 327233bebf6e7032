"""The folder of cached kernels, which runs as code: private to the user, checked at each use.

Generated source and Numba's machine code lie in `kernels` below the cache directory. Whoever can
write there, or replace a folder above it, can run code as the user, so such a folder is refused.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

ENVIRONMENT = "SPIKEFUSE_CACHE_DIR"
FIX = f"set {ENVIRONMENT} to a folder"
MAX_LINKS = 40

_checked: set[Path] = set()


def directory() -> Path:
    """Return $SPIKEFUSE_CACHE_DIR/kernels, else spikefuse/kernels in the user's cache."""
    chosen = os.environ.get(ENVIRONMENT)
    if chosen:
        return Path(chosen).expanduser() / "kernels"
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # neither HOME nor an entry in the list of users
        cache = Path(tempfile.gettempdir(), f"cache-{os.getuid()}")
    return cache / "spikefuse" / "kernels"


def private_directory() -> Path:
    """Return `directory()` without links, made if it does not exist, readable by the user only.

    Raises:
        OSError: it cannot be made, or another user could write it, a file in it, or a folder or
            link on the way to it.
    """
    folder = directory()
    try:
        if os.name != "posix":
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        folder = check_ancestors(folder)
        _make_private(folder)
    except ForeignFile:
        raise
    except OSError as error:
        raise OSError(
            f"can't write generated kernels to {folder}: {error.strerror}; {FIX} that can be "
            "written"
        ) from error
    return folder


class ForeignFile(PermissionError):
    """A folder or file of the cache belongs to another user, or another user can write it."""


def check_ancestors(folder: Path) -> Path:
    """Return a folder's path without links, after a check from the root of each folder and link.

    Missing folders are made, for the user only. No part of the result can change afterwards, except
    by its owners: the user, root and who owns the root of the file system.

    Raises:
        ForeignFile: a part belongs to another user, or others can write it and so replace what is
            in it. A sticky folder such as /tmp is none: there, only owners replace.
        OSError: a part is no folder, or can't be made.
    """
    pending, real, links = _parts(folder.absolute()), Path(folder.absolute().anchor), 0
    while pending:
        name = pending.pop()
        if name == "..":
            real = real.parent
            continue
        path = real / name
        try:
            status = path.lstat()
        except FileNotFoundError:
            path.mkdir(mode=0o700, exist_ok=True)
            status = path.lstat()
        _check_owner(path, status)
        if stat.S_ISLNK(status.st_mode):
            links += 1
            target = path.readlink()
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            real = Path(target.anchor) if target.is_absolute() else real
            pending += _parts(target)
            continue
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, f"{path} is not a folder")
        if pending and not status.st_mode & stat.S_ISVTX:
            _check_modes(path, status)
        real = path
    return real


def _parts(path: Path) -> list[str]:
    """Return the names in a path, the last one first."""
    return [name for name in reversed(path.parts) if name != path.anchor]


def check_foreign(folder: Path) -> None:
    """Check another library's folder of compiled kernels, once in a process; make a missing one.

    Raises:
        OSError: another user could write it, a file in it, or a folder or link on the way to it.
    """
    if os.name != "posix" or folder in _checked:
        return
    real = check_ancestors(folder)
    status = real.stat()
    if status.st_mode & 0o077:
        _check_modes(real, status)
        _check_files(real, _check_modes)
    _checked.add(folder)


@functools.cache
def _is_own_group(group_id: int) -> bool:
    """Whether the user is the only member of a group."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group_id)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _make_private(folder: Path) -> None:
    """Let only the user enter a folder, after a check of its files, once in a process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        _check_owner(folder, status)
        _check_all_modes(folder, status)
        # Where others cannot enter, the modes of files are without effect.
        is_private = not status.st_mode & 0o077
        if folder not in _checked:
            _check_files(folder, _check_owner if is_private else _check_all_modes)
        if not is_private and status.st_uid == os.geteuid():
            os.fchmod(descriptor, 0o700)
        _checked.add(folder)
    finally:
        os.close(descriptor)


def _check_files(folder: Path, check: Callable[[Path, os.stat_result], None]) -> None:
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue  # a temporary file of another process
            _check_owner(path, status)
            check(path, status)


def _check_owner(path: Path, status: os.stat_result) -> None:
    # In a container, the root of the file system may belong to another user.
    if status.st_uid not in (os.geteuid(), 0, os.stat("/").st_uid):
        raise ForeignFile(
            f"{path}, on the way to or among the cached kernels, belongs to user {status.st_uid}, "
            f"who could run code as you: {FIX} of your own"
        )


def _check_modes(path: Path, status: os.stat_result) -> None:
    """Refuse what others can write; the user's own group, which many systems have, is none."""
    if status.st_mode & stat.S_IWOTH or not _is_own_group(status.st_gid):
        _check_all_modes(path, status)


def _check_all_modes(path: Path, status: os.stat_result) -> None:
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(status.st_mode):
        raise ForeignFile(
            f"other users can write {path} and so run code as you (mode "
            f"{stat.S_IMODE(status.st_mode):o}): delete it, or {FIX} of your own"
        )
