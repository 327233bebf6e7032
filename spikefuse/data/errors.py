"""The one error of this room."""

from __future__ import annotations


class DataError(ValueError):
    """A data set cannot be read; the message is one line that names the file and the fix."""
