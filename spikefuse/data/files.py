"""Where the files of a data set lie, and how those that are missing get there."""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spikefuse.data.errors import DataError

ENVIRONMENT = "SPIKEFUSE_DATA"


@dataclass(frozen=True)
class Source:
    """A published set of files.

    Args:
        name: the data set's name, also of its folder.
        url: where the files are published, ending in a slash.
        sha256: checksum of each file, by name.
    """

    name: str
    url: str
    sha256: Mapping[str, str]


def default_directory() -> Path:
    """$SPIKEFUSE_DATA where it is set, otherwise a folder in the user's cache."""
    if directory := os.environ.get(ENVIRONMENT):
        return Path(directory).expanduser()
    if sys.platform == "darwin":
        cache = Path.home() / "Library" / "Caches"
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "spikefuse" / "data"


def locate(source: Source, directory: Path, download: bool) -> dict[str, Path]:
    """Path of every file of `source`, by published name.

    A file may lie in `directory` or in its subfolder `source.name`, compressed (`name.gz`) or
    plain (`name`).

    Raises:
        DataError: a file is missing and `download` is False, or the download failed.
    """
    folder = directory / source.name
    found = {name: _find(name, (folder, directory)) for name in source.sha256}
    missing = [name for name, path in found.items() if path is None]
    if missing and not download:
        raise DataError(
            f"{source.name}: {missing[0]} is neither in {folder} nor in {directory}: add "
            f"--download to fetch it, or name the folder that has it with --data-dir or "
            f"{ENVIRONMENT}"
        )
    for name in missing:
        found[name] = _download(source, name, folder)
    return {name: path for name, path in found.items() if path is not None}


def _find(name: str, folders: tuple[Path, ...]) -> Path | None:
    candidates = (folder / file for folder in folders for file in (name, name.removesuffix(".gz")))
    return next((path for path in candidates if path.is_file()), None)


def _download(source: Source, name: str, folder: Path) -> Path:
    """Fetch one file; it appears in `folder` only when it is whole and its checksum is right."""
    try:
        import pooch
    except ImportError as error:
        raise DataError(
            '--download needs pooch, which is not installed: pip install "spikefuse[train]"'
        ) from error
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
    except OSError as error:  # the errors of requests are among them
        if (response := getattr(error, "response", None)) is not None:
            response.close()  # pooch leaves the connection of an HTTP error open
        raise DataError(
            f"cannot download {url} to {folder} ({type(error).__name__}): check the connection, "
            f"or fetch the file by other means and put it there"
        ) from error
    except ValueError as error:
        raise DataError(
            f"{url} has not the expected SHA-256 checksum, nothing was kept: try again, or fetch "
            f"the file elsewhere and put it in {folder}"
        ) from error
    return Path(path)


def find_folder(name: str, marks: tuple[str, ...], directory: Path, page: str) -> Path:
    """The folder that holds every file or folder of `marks`: `directory/name` or `directory`.

    Args:
        name: the data set's name, also of its folder.
        marks: what has to be there, relative to the folder.
        directory: where data sets lie.
        page: where the data set is published, for the message.

    Raises:
        DataError: something of `marks` is missing.
    """
    folders = (directory / name, directory)
    for folder in folders:
        if all((folder / mark).exists() for mark in marks):
            return folder
    best = max(folders, key=lambda folder: sum((folder / mark).exists() for mark in marks))
    missing = next(mark for mark in marks if not (best / mark).exists())
    raise DataError(
        f"{name}: {missing} is neither in {folders[0]} nor in {directory}: fetch the data set "
        f"from {page} and unpack it there, or name the folder that has it with --data-dir or "
        f"{ENVIRONMENT}; --download does not fetch this one"
    )


def read_bytes(path: Path) -> bytes:
    """Content of a file, decompressed if it is gzip (told by its content, not by its name).

    Raises:
        DataError: the file cannot be read, or its compression is damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise damaged(path, f"gzip: {str(error).rstrip('.')}") from error


def damaged(path: Path, what: str) -> DataError:
    """The error for a file that is there but cannot be what its name says."""
    return DataError(
        f"{path} is damaged ({what}): delete it, then fetch it anew, with "
        f"--download where the data set has one"
    )
