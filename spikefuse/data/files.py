"""Where the files of a data set lie, and how those that are missing get there."""

from __future__ import annotations

import os
import sys
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
