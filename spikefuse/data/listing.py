"""Labelled files in a user's folder: one subfolder per class, or a table of labels."""

from __future__ import annotations

import codecs
import csv
import math
import os
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from spikefuse.data.files import DataError, Files, class_files, files_below, read_bytes
from spikefuse.data.images import draw

# Names of the folders of each part, in any case; a dataset without them is split.
PARTS = (("train", "training"), ("val", "valid", "validation"), ("test", "testing"))
TEST_FRACTION = 0.2
# Tables of labels with their delimiter, and the folder of their files; and the most bytes of one.
TABLES = (("labels.csv", ",", ""), ("val_annotations.txt", "\t", "images"))
TABLE_BYTES = 1 << 28


def list_files(
    folder: Path, endings: Collection[str], seed: int = 0
) -> tuple[tuple[str, ...], tuple[Files, ...]]:
    """List the files of a folder by part and class.

    The folder holds a folder `train`, and `val`, `test` or both, each by a name of `PARTS`; without
    these, a fifth of each class, rounded, is drawn for the test. In each, files are in one folder
    per class, at any depth, or named by the table `labels.csv`, with the columns file and label. A
    table of the whole folder may name files in `train` and other parts, and then in all of them.

    Args:
        folder: of the dataset.
        endings: suffixes of the files, in lower case.
        seed: of the draw.

    Returns:
        The names of the classes in alphabetical order, and the files for (training, test) or
        (training, validation, test).

    Raises:
        DataError: the folder is missing, has fewer than two classes or a class without files, has
            `train` beside folders that are no parts, a table is damaged, has fractions as labels or
            names no file of a part, or the parts differ in classes.

    Warns:
        UserWarning: files in folders of classes have other endings, files are beside these, or a
            table leaves out files or has a single file of most classes.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: expected one with a folder per class")
    names = _subfolders(folder)
    if (folder / "val" / TABLES[1][0]).is_file():
        names = [name for name in names if name != "test"]  # Tiny-ImageNet's, which has no labels
    found = [[name for name in names if name.lower() in part] for part in PARTS]
    places = [folder / part[0] for part in found if part]
    beside = ", ".join(name for name in names if folder / name not in places)
    if not places or (beside and not found[0]) or (folder / TABLES[0][0]).is_file():
        places = [folder]  # a table names the files, or folders of other names are classes
    elif beside:
        parts_found = ", ".join(place.name for place in places)
        raise DataError(
            f"{folder} has {beside} beside {parts_found}: move {beside} elsewhere, or rename "
            f"{parts_found} if these are classes, too"
        )
    elif not found[0]:
        raise DataError(f"{folder} has {places[0].name}, but no folder train: add it")
    classes, *parts = _list(places[0], endings, None)
    if places == [folder]:
        _check_all_named(folder, parts[0], [name for part in found for name in part])
    if len(classes) < 2:
        raise DataError(f"{places[0]} has one class, {classes[0]}: expected several")
    for place in places[1:]:
        others, part = _list(place, endings, classes)
        if odd := sorted({*others} ^ {*classes}):
            raise DataError(
                f"{odd[0]} is a class in only one of {places[0]} and {place}: both need the same "
                "folders"
            )
        parts.append(part)
    _warn_of_skipped(folder, places, endings, [path for part in parts for path in part.others])
    if len(parts) == 1:
        parts = _by_part(folder, parts[0], classes)
    if len(parts) == 1:
        test = draw(torch.from_numpy(parts[0].labels), TEST_FRACTION, seed).numpy()
        if not test.any():
            raise DataError(f"{folder} has {len(test)} files: too few to test with a fifth")
        parts = [parts[0].rows(~test), parts[0].rows(test)]
    return classes, tuple(parts)


def _warn_of_skipped(
    folder: Path, places: Sequence[Path], endings: Collection[str], skipped: Sequence[Path]
) -> None:
    unnamed = [path for path in skipped if path.suffix.lower() in endings]
    unread = [path for path in skipped if path.suffix.lower() not in endings]
    loose = [path for path in unnamed if path.parent in places]
    unnamed = [path for path in unnamed if path.parent not in places]
    for paths, why in (
        (unread, f"only those that end in {', '.join(sorted(endings))} are read"),
        (unnamed, "the table of labels does not name them"),
        (loose, "no folder of a class has them, and no table of labels names them"),
    ):
        if paths:
            what = f"skipped {len(paths):,} of the files in {folder}, such as {paths[0]}"
            warnings.warn(f"{what}: {why}", stacklevel=4)


def _list(
    folder: Path, endings: Collection[str], known: Sequence[str] | None
) -> tuple[tuple[str, ...], Files]:
    """Return the classes of a part and its files; those of a table number the `known` classes."""
    for name, delimiter, inner in TABLES:
        if (folder / name).is_file():
            labels = _read_table(folder / name, delimiter, folder / inner, known)
            if known is None:
                _check_classes(folder / name, Counter(labels.values()))
            classes = tuple(known or sorted({*labels.values()}))
            numbers = {label: number for number, label in enumerate(classes)}
            targets = np.array([numbers[label] for label in labels.values()])
            below = files_below(folder / inner, endings)
            unnamed = [path for path in below if path not in labels and path != folder / name]
            return classes, Files(tuple(labels), targets, tuple(unnamed))
    classes = tuple(_subfolders(folder))
    if not classes:
        raise DataError(
            f"{folder} has no folder per class: move its files into folders named after their "
            "class, or list them in labels.csv, with the columns file and label"
        )
    files = class_files(folder, classes, endings, "add one, or remove the folder")
    shown = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != ".")
    beside = (path for path in shown if path.suffix.lower() in endings)
    return classes, replace(files, others=(*files.others, *beside))


def _check_classes(table: Path, counts: Counter[str]) -> None:
    """Refuse labels that are fractions, and warn if most of them belong to one file."""
    values = "to train on values, write a dataset of your own for --task regression"
    fractions = [label for label in counts if not _number(label).is_integer()]
    if fractions and all(math.isfinite(_number(label)) for label in counts):
        raise DataError(
            f"the labels in {table} are numbers, such as {fractions[0]}, and each of the "
            f"{len(counts)} would be a class: {values}; if they are names of classes, add a "
            f"letter, such as x{fractions[0]}"
        )
    single = [label for label, count in counts.items() if count == 1]
    if len(single) > len(counts) / 2 and len(single) > 2:
        warnings.warn(
            f"{len(single)} of the {len(counts)} labels in {table} have a single file, such as "
            f"{single[0]!r}: a class needs several; {values}",
            stacklevel=5,
        )


def _number(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        return math.nan


def _check_all_named(folder: Path, files: Files, names: Sequence[str]) -> None:
    """Raise DataError if a folder called as a part has files, none of which the table names."""
    left_out = {path.relative_to(folder).parts[0] for path in files.others}
    named = {path.relative_to(folder).parts[0] for path in files.paths}
    for name in names:
        if name in left_out - named:
            raise DataError(
                f"{folder / TABLES[0][0]} names no file in {name}: add the files of {name}, or "
                f"move {name} elsewhere"
            )


def _by_part(folder: Path, files: Files, classes: Sequence[str]) -> list[Files]:
    """Split the files of one table by part, if all of them are in `train` and others of `PARTS`.

    Raises:
        DataError: a class is not in `train`.
    """
    tops = [path.relative_to(folder).parts[0].lower() for path in files.paths]
    found = [np.array([top in names for top in tops]) for names in PARTS]
    if not found[0].any() or not np.any(found, 0).all():
        return [files]
    parts = [files.rows(part) for part in found if part.any()]
    if odd := sorted({*files.labels} - {*parts[0].labels}):
        raise DataError(
            f"{folder / TABLES[0][0]}: {classes[odd[0]]} is a class of no file in "
            f"{parts[0].paths[0].relative_to(folder).parts[0]}: add one, or correct it"
        )
    return parts


def _subfolders(folder: Path) -> list[str]:
    names = (entry.name for entry in folder.iterdir() if entry.is_dir())
    return sorted(name for name in names if not name.startswith((".", "__")))


def _columns(delimiter: str, found: Sequence[str]) -> str:
    between = "tabs" if delimiter == "\t" else "commas"
    names = f"one column, {found[0]!r}" if len(found) == 1 else ", ".join(map(repr, found))
    return f"the columns file and label, with {between} between: found {names}"


def _file_in(folder: Path, name: str) -> Path | None:
    """Return the file in the folder of this name or absolute path, or None if there is none."""
    inner = Path(name)
    for root in (Path(os.path.abspath(folder)), folder.resolve()):
        if inner.is_relative_to(root):
            inner = inner.relative_to(root)
    file = folder / inner
    is_inside = ".." not in inner.parts and file.is_relative_to(folder)
    return file if is_inside and file.is_file() else None


def _read_table(
    path: Path, delimiter: str, folder: Path, known: Sequence[str] | None
) -> dict[Path, str]:
    """Return the class of each file, in columns that the first row may name; else the first two.

    Rows without content are skipped. The text is in UTF-8, or as its first bytes say in UTF-16.
    """
    content = read_bytes(path, TABLE_BYTES)
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = content.decode("utf-16" if is_utf16 else "utf-8-sig", "replace")
    labels: dict[Path, str] = {}
    columns = 0, 1
    try:
        rows = enumerate(csv.reader(text.splitlines(), delimiter=delimiter), 1)
        stripped = ((number, [cell.strip() for cell in row]) for number, row in rows)
        filled = ((number, cells) for number, cells in stripped if any(cells))
        for i, (number, cells) in enumerate(filled):
            at, header = f"{path}, line {number}", [cell.lower() for cell in cells if i == 0]
            if "file" in header and not (folder / cells[0]).is_file():
                if "label" not in header:
                    raise DataError(f"{at}: expected a column label among {', '.join(cells)}")
                columns = header.index("file"), header.index("label")
                continue
            name, label = (cells[i] if i < len(cells) else "" for i in columns)
            file = _file_in(folder, name)
            if file is None:
                hint = f", or name {_columns(delimiter, cells)}" if i == 0 else ""
                raise DataError(f"{at}: {name!r} is not a file in {folder}: correct it{hint}")
            if not label or label not in (known or [label]):
                such = f" of training, such as {known[0]}" if known else ""
                raise DataError(f"{at}: {label!r} is not a class{such}: correct it")
            if file in labels:
                raise DataError(
                    f"{at}: {name!r} is listed before, as {labels[file]!r}: remove one of the rows"
                )
            labels[file] = label
    except csv.Error as error:
        raise DataError(f"{path} is not a table of text ({error}): correct it") from error
    if not labels:
        raise DataError(f"{path} lists no file: add rows of a file and its class")
    return labels
