"""Locate, download and read the files of a dataset."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import os
import stat
import sys
import tempfile
import uuid
import zlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from spikefuse import isolated

ENVIRONMENT = "SPIKEFUSE_DATA"
CHUNK = 1 << 20
CGROUP = Path("/sys/fs/cgroup")  # of this process, in a container
HIDDEN = {"thumbs.db", "desktop.ini"}  # of Windows; other systems' names begin with a dot
# Where a format sets no limit, a file decompresses to at most 1 GiB; the largest published one has
# 47 MB.
MAX_DECOMPRESSED = 1 << 30
# In an installed package this is site-packages, which has no pyproject.toml.
CHECKOUT = Path(__file__).resolve().parents[2]


class DataError(ValueError):
    """A dataset cannot be read; the one-line message names the file and the fix.

    All readers raise it where a file is missing or damaged, or a package is not installed.
    """


@dataclass(frozen=True)
class DownloadSource:
    """Files published at a URL.

    Args:
        name: name of the dataset and of its folder.
        url: where the files are published, ending in a slash.
        sha256: checksum of each file, by name.
    """

    name: str
    url: str
    sha256: Mapping[str, str]


def user_cache() -> Path:
    """Return this library's folder in the user's cache; without a home, among temporary files."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spikefuse"
    except RuntimeError:  # neither HOME nor an entry in the list of users
        return Path(tempfile.gettempdir(), f"cache-{os.getuid()}", "spikefuse")


def default_directory() -> Path:
    """Return $SPIKEFUSE_DATA, else `data/` of a source checkout if it exists, else a cache."""
    if directory := os.environ.get(ENVIRONMENT):
        return Path(directory).expanduser()
    local = CHECKOUT / "data"
    if local.is_dir() and (CHECKOUT / "pyproject.toml").is_file():
        return local
    return user_cache() / "data"


def locate(source: DownloadSource, directory: Path, download: bool) -> dict[str, Path]:
    """Return the path of every file of `source`, by published name.

    A file may be in `directory` or in its subfolder `source.name`, compressed (`name.gz`) or not
    (`name`).

    Raises:
        DataError: a file is missing and `download` is False, or the download failed.
    """
    folder = directory / source.name
    found = {}
    for name in source.sha256:
        path = _find(name, (folder, directory))
        if path is None and not download:
            raise _missing(source.name, name, directory, "add --download to fetch it")
        found[name] = path or _download(source, name, folder)
    return found


def _find(name: str, folders: tuple[Path, ...]) -> Path | None:
    candidates = (folder / file for folder in folders for file in (name, name.removesuffix(".gz")))
    return next((path for path in candidates if path.is_file()), None)


def _download(source: DownloadSource, name: str, folder: Path) -> Path:
    """Download one file into `folder`; it appears there only if its checksum is correct."""
    try:
        import pooch
    except ImportError as error:
        raise not_installed("--download", "pooch", "train") from error
    url = source.url + name
    pooch.get_logger().setLevel("WARNING")
    try:
        path = pooch.retrieve(
            url,
            known_hash=f"sha256:{source.sha256[name]}",
            fname=name,
            path=folder,
            downloader=pooch.HTTPDownloader(progressbar=True, timeout=30),
        )
    except OSError as error:  # includes the errors of requests
        if (response := getattr(error, "response", None)) is not None:
            response.close()  # pooch leaves the connection open after an HTTP error
        raise DataError(
            f"cannot download {url} to {folder} ({type(error).__name__}): check the connection, "
            f"or download the file by other means and put it there"
        ) from error
    except ValueError as error:
        raise DataError(
            f"{url} does not have the expected SHA-256 checksum, so nothing was saved: try again, "
            f"or put a copy of the file in {folder}"
        ) from error
    return Path(path)


def find_folder(
    name: str, entries: tuple[str, ...], directory: Path, page: str, unpacked: str = ""
) -> Path:
    """Return the first of `directory/name` and `directory` that contains all of `entries`.

    Args:
        name: name of the dataset and of its folder.
        entries: files or folders that must exist, relative to the folder.
        directory: folder of the datasets.
        page: where the dataset is published, for the error message.
        unpacked: folder in the published archive, searched in both, too.

    Raises:
        DataError: one of `entries` is missing.
    """
    folders = [base / sub for base in (directory / name, directory) for sub in ("", unpacked)]
    for folder in folders:
        if all((folder / entry).exists() for entry in entries):
            return folder
    best = max(folders, key=lambda folder: sum((folder / entry).exists() for entry in entries))
    missing = next(entry for entry in entries if not (best / entry).exists())
    how = f"--download does not support this dataset: get it from {page} and unpack it there"
    raise _missing(name, missing, directory, how)


def _missing(name: str, what: str, directory: Path, how: str) -> DataError:
    return DataError(
        f"{name}: {what} is neither in {directory / name} nor in {directory}: {how}, or set the "
        f"folder that has it with --data-dir or {ENVIRONMENT}"
    )


@dataclass(frozen=True)
class Files:
    """Labelled files.

    Args:
        paths: one per example.
        labels: int64 `[N]`.
        others: files beside them that are skipped: they have other endings, or no row in a table.
    """

    paths: tuple[Path, ...]
    labels: np.ndarray
    others: tuple[Path, ...] = ()

    def rows(self, chosen: np.ndarray) -> Files:
        """Return the files for which `chosen`, bool `[N]`, is True, or at these positions."""
        numbers = np.arange(len(self.paths))[chosen]
        return Files(tuple(self.paths[i] for i in numbers), self.labels[numbers])


def class_files(folder: Path, classes: Sequence[str], endings: Collection[str], how: str) -> Files:
    """List the files below the subfolder of each class, by class and name.

    Args:
        folder: contains one subfolder per class.
        classes: names of the subfolders; labels number them.
        endings: suffixes of the files, in lower case.
        how: what to do if there is no file, for the error message.

    Raises:
        DataError: a class has no file.
    """
    files: list[Path] = []
    labels: list[int] = []
    others: list[Path] = []
    for label, name in enumerate(classes):
        found = files_below(folder / name)
        own = [path for path in found if path.suffix.lower() in endings]
        if not own:
            raise DataError(f"no {' or '.join(sorted(endings))} file in {folder / name}: {how}")
        files += own
        labels += [label] * len(own)
        others += [path for path in found if path.suffix.lower() not in endings]
    return Files(tuple(files), np.array(labels), tuple(others))


def files_below(folder: Path, endings: Collection[str] | None = None) -> list[Path]:
    """List the files below a folder by name, without those that programs hide.

    Args:
        folder: of the files.
        endings: suffixes of the files, in lower case; None for all.
    """
    files: list[Path] = []
    for place, inner, names in os.walk(folder):
        inner[:] = [name for name in inner if name[0] != "."]
        shown = (name for name in names if name[0] != "." and name.lower() not in HIDDEN)
        paths = [Path(place, name) for name in shown]
        files += [path for path in paths if endings is None or path.suffix.lower() in endings]
    return sorted(files)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new temporary path that replaces `path`, on disk, if the block succeeds."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.filename == str(temporary):  # which nobody knows
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def check_regular(path: Path) -> None:
    """Refuse what is not a regular file: reading a FIFO would wait for ever.

    Raises:
        DataError: the file is missing, or is a folder, FIFO, socket or device.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise DataError(f"cannot read {path}: it is not a regular file")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """Open a file for reading, decompressed if its content is gzip, whatever its name.

    The checksum of gzip is verified when the block reads past the last byte.
    """
    check_regular(path)
    try:
        with path.open("rb") as file:
            if file.peek(2)[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=file) as content:
                    yield content
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(path, f"gzip: {str(error).rstrip('.')}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise DataError(f"cannot read {path}: its content does not fit into memory") from error


def free_memory() -> int:
    """Return the bytes of memory that are free, without limit where there is no /proc.

    A container may have a limit of its own. Memory that caches files counts as free.
    """
    free = sys.maxsize
    with contextlib.suppress(OSError, IndexError, ValueError):
        lines = Path("/proc/meminfo").read_text()
        free = int(lines.partition("MemAvailable:")[2].split()[0]) << 10
    with contextlib.suppress(OSError, KeyError, ValueError):  # "max" means no limit
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        lines = (CGROUP / "memory.stat").read_text()
        sizes = dict(line.split() for line in lines.splitlines())
        cached = int(sizes["active_file"]) + int(sizes["inactive_file"])
        free = min(free, max(0, limit - used + cached))
    return free


def read_up_to(file: IO[bytes] | gzip.GzipFile, size: int) -> bytes:
    """Read `size` bytes, or fewer at the end of a file, and allocate no more than the file has."""
    chunks = []
    while size > 0 and (chunk := file.read(min(size, CHUNK))):
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def max_content(path: Path) -> int:
    """Return the largest number of bytes that a file of any format may hold, decompressed."""
    return max(MAX_DECOMPRESSED, path.stat().st_size)


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """Read a file, and decompress it if its content is gzip, whatever its name.

    Args:
        limit: most bytes that the format allows; by default 1 GiB, or the file's own size.

    Raises:
        DataError: the file cannot be read, its compression is damaged, or it has more content.
    """
    with opened(path) as file:
        limit = max_content(path) if limit is None else limit
        content = read_up_to(file, limit + 1)
    if len(content) > limit:
        raise damaged(path, f"it has more than {limit} bytes of content")
    return content


def damaged(path: Path, what: str) -> DataError:
    """Return the error for a file that exists but is invalid."""
    return DataError(
        f"{path} is damaged ({what}): replace it with an intact copy, or delete it and use "
        "--download if the dataset supports it"
    )


def not_installed(reader: str, package: str, extra: str) -> DataError:
    """Return the error for a missing package of an extra."""
    return DataError(
        f'{reader} needs {package}, which is not installed: pip install "spikefuse[{extra}]"'
    )


def read_isolated(
    path: Path,
    program: str,
    library: str,
    error_of: Callable[[Path, str], DataError] = damaged,
) -> Generator[np.ndarray]:
    """Yield the arrays that a program beside this file reads from a file; see `isolated.arrays`.

    Args:
        error_of: makes the error for content that the program refuses.
    """
    if importlib.util.find_spec(library) is None:
        raise not_installed(path.name, library, "events")
    check_regular(path)
    try:
        yield from isolated.arrays(Path(__file__).with_name(program), library, path)
    except OSError as error:  # such as of starting the process
        raise DataError(f"cannot read {path}: {error}") from error
    except ValueError as error:
        raise error_of(path, str(error)) from error
