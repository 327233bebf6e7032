"""The description of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spikefuse.data.files import DataError
from spikefuse.data.images import Examples

# Reads the recordings, sounds or series in a file.
Reader = Callable[..., Iterator[Any]]


@dataclass(frozen=True)
class Dataset:
    """The description of a dataset, ours or a user's own.

    Example::

        def read(directory, download):
            train, test = torch.load(directory / "shapes.pt")  # (uint8 [N, 1, 16, 16], int64 [N])
            return sf.data.Images(*train), sf.data.Images(*test)

        shapes = sf.data.Dataset((1, 16, 16), ("circle", "square"), read)

    Args:
        shape: shape of an image, (C, H, W), of a frame, (P, H, W), or (W,) for audio, or of a step
            of a series, either.
        classes: name of each label, or of each value of a target; empty only with `describe`.
        read: maps (directory, download, **transform) to (training examples, test examples), or to
            (training, validation, test), which are `Images`, `Frames`, `Series` or other
            `Examples`.
            `DataError` reports missing files.
        kind: "images", which are encoded as sequences, "events", which are sequences of counts, or
            "series", which are sequences of values.
        transform: the options of `load` that this dataset takes, with their defaults; those of
            events and series include num_steps.
        files: of events and series, the ending of the files that `read_file` accepts, or several,
            and their reader, which takes a path and the options: of events, those that are not of
            `Slicing`. A reader of series yields float32 arrays `[T, *shape]`.
        scale: of events, a network's input is `scale` times the values of the frames.
        describe: if shape and classes depend on the files, maps (directory, **transform) to their
            description.
        name: for error messages.

    Raises:
        DataError: there are no classes, or two of the same name.
    """

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    read: Callable[..., tuple[Examples, ...]]
    kind: Literal["images", "events", "series"] = "images"
    transform: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str | tuple[str, ...], Reader] | None = None
    scale: float = 1.0
    describe: Callable[..., Dataset] | None = None
    name: str = "the dataset"

    def __post_init__(self) -> None:
        names = self.classes
        if len(names) == 0 and self.describe is None:
            raise DataError("classes is empty: name each label, or each value of a target")
        if len({*names}) < len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise DataError(f"classes has {twice!r} twice: give each class a name of its own")
