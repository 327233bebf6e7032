"""Random folders, links, owners and modes on the way to cached kernels, and another user.

What is accepted is attacked by a process of another user, who replaces what it can: needs root.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from spikefuse.kernels import cache_folder

OTHER = 12345
MODES = (0o700, 0o755, 0o711, 0o775, 0o777, 0o1777, 0o757, 0o2775, 0o770)


def owned(path: Path, rng: random.Random) -> None:
    uid, gid = (OTHER if rng.random() < 0.15 else 0 for _ in range(2))
    os.chown(path, uid, gid, follow_symlinks=False)
    if not path.is_symlink():
        path.chmod(rng.choice(MODES) if rng.random() < 0.5 else 0o755)


def build(root: Path, rng: random.Random) -> Path:
    """Return a path of one to four folders and links below `root`, which may not all exist."""
    path = root
    for i in range(rng.randint(1, 4)):
        path = path / rng.choice("abc")
        if path.exists():
            continue
        if not path.parent.exists() or path.is_symlink():
            break
        form = rng.choice(("folder", "folder", "link", "missing"))
        if form == "link":
            target = root / f"target{i}"
            target.mkdir(exist_ok=True)
            owned(target, rng)
            path.symlink_to(
                target if rng.random() < 0.5 else os.path.relpath(target, path.parent.resolve())
            )
        elif form == "folder":
            path.mkdir()
        else:
            break
        owned(path, rng)
        if rng.random() < 0.2:
            (path / "kernels").mkdir(exist_ok=True)
            owned(path / "kernels", rng)
    return path


def attempts(path: Path) -> Iterator[str]:
    """Yield what succeeds of replacing each part of a path, and of writing to the last one."""
    for part in (path, *path.parents):
        for place in {part, part.resolve()}:
            with contextlib.suppress(OSError):
                os.rename(place, f"{place}.old")
                yield f"{place} is replaced"
            with contextlib.suppress(OSError):
                (place / "code.py").touch()
                if place.resolve() == path.resolve():
                    yield f"{place} is written"


def attacked(path: Path) -> str:
    """Return the first attempt that succeeds as another user, or nothing."""
    reader, writer = os.pipe()
    if not os.fork():
        os.setgroups([])
        os.setresgid(OTHER, OTHER, OTHER)
        os.setresuid(OTHER, OTHER, OTHER)
        os.write(writer, next(attempts(path), "").encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    with open(reader, "rb") as file:
        return file.read().decode()


def case(seed: int) -> list[str]:
    if os.geteuid():
        return []
    rng, found = random.Random(seed), []
    Path.cwd().chmod(0o711)  # others reach what is below
    root = Path(tempfile.mkdtemp(dir=Path.cwd()))
    root.chmod(0o755)
    chosen = build(root, rng)
    cache_folder._checked.clear()
    with mock.patch.dict(os.environ, {"SPIKEFUSE_CACHE_DIR": str(chosen)}):
        try:
            folder = cache_folder.private_directory()
        except OSError as error:
            found = [] if str(root) in str(error) else [str(error)]
        else:
            for path in (folder, chosen / "kernels"):
                if what := attacked(path):
                    found.append(what)
    shutil.rmtree(root)
    return found
