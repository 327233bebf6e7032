"""Ctrl-C that lets the step in progress finish."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from spikefuse.train.processes import PeerLost, Processes

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# torchrun kills what has not ended 30 s after its signal.
PATIENCE_SECONDS = 20.0


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

    Of several processes, one that lost another does not wait for it: see `give_up`.

    Args:
        checkpoint: where the run saves its state.
        processes: those of the run.
    """

    def __init__(self, checkpoint: Path, processes: Processes | None = None) -> None:
        self.checkpoint = checkpoint
        self.processes = Processes() if processes is None else processes
        self.requested: int | None = None
        self._previous: dict[int, Any] = {}
        self._over = threading.Event()

    def __enter__(self) -> Interruption:
        self._previous = {number: signal.getsignal(number) for number in SIGNALS}
        self.listen()
        if self.processes.count > 1:
            self._bells = socket.socketpair()
            self._bells[1].setblocking(False)
            signal.set_wakeup_fd(self._bells[1].fileno())
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.processes.count > 1:
            signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def listen(self) -> None:
        """Handle the signals here, and nowhere else."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def stop(self) -> None:
        """Raise `Interrupted`, as the signal asked for."""
        assert self.requested is not None
        raise Interrupted(self.requested, self._saved())

    def give_up(self, why: str = "") -> NoReturn:
        """Raise `PeerLost`; what torchrun sends to hurry this process on is ignored from now."""
        self._previous = dict.fromkeys(SIGNALS, signal.SIG_IGN)
        raise PeerLost(self.processes.rank, self._saved(), why)

    def _saved(self) -> Path | None:
        return self.checkpoint if self.checkpoint.exists() else None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            self.stop()
        self.requested = signum
        if not self.processes.main:
            return
        what = "this step" if self.processes.count == 1 else "a few steps"
        # Not `print`: the signal may have come in the middle of another write to the same stream.
        with contextlib.suppress(OSError):
            os.write(2, f"\nfinishing {what}, then saving; again to stop at once\n".encode())

    def _watch(self) -> None:
        """End this process some time after a signal, if it has not ended itself: it may wait for
        another one that is no more, in a call that no signal handler interrupts."""
        self._bells[0].recv(1)
        if self._over.wait(PATIENCE_SECONDS):
            return
        with contextlib.suppress(OSError):
            os.write(2, f"{PeerLost(self.processes.rank, self._saved())}\n".encode())
        os._exit(1)
