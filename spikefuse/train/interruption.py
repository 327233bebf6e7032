"""Ctrl-C that lets the step in progress finish."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """The run was stopped by a signal.

    Like KeyboardInterrupt no Exception; unlike it, Lightning passes it on instead of exiting.

    Args:
        signum: the signal.
        checkpoint: the file to resume from, or None if there is none yet.
    """

    def __init__(self, signum: int, checkpoint: Path | None) -> None:
        super().__init__(signum, checkpoint)
        self.signum, self.checkpoint = signum, checkpoint


class Interruption:
    """Context in which a first Ctrl-C (or SIGTERM) is only noted, in `requested`.

    A second one raises `Interrupted` at once. For the main thread, as all signal handlers.

    Args:
        checkpoint: where the run saves its state.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.requested: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def stop(self) -> None:
        """Raise `Interrupted`, as the signal asked for."""
        assert self.requested is not None
        raise Interrupted(self.requested, self.checkpoint if self.checkpoint.exists() else None)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            self.stop()
        self.requested = signum
        # Not `print`: the signal may have come in the middle of another write to the same stream.
        with contextlib.suppress(OSError):
            os.write(2, b"\nfinishing this step, then saving; again to stop at once\n")
