"""Handle Ctrl-C and SIGTERM after the current step."""

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
# torchrun kills processes that are still running 30 s after its signal.
PATIENCE_SECONDS = 20.0


class RunInterrupted(BaseException):
    """A signal stopped the run.

    Like KeyboardInterrupt it is not an Exception, but Lightning does not turn it into an exit.

    Args:
        checkpoint: the file to resume from, or None if nothing was saved.
    """

    def __init__(self, signum: int, checkpoint: Path | None) -> None:
        super().__init__(signum, checkpoint)
        self.signum, self.checkpoint = signum, checkpoint


class SignalHandler:
    """Context manager that records a first Ctrl-C (or SIGTERM) in `requested`.

    A second one raises `RunInterrupted` immediately. Use it in the main thread, as all signal
    handlers. A process that lost another one calls `give_up` instead of waiting for it.

    Args:
        checkpoint: file in which the run saves its state.
    """

    def __init__(self, checkpoint: Path, processes: Processes | None = None) -> None:
        self.checkpoint = checkpoint
        self.processes = Processes() if processes is None else processes
        self.requested: int | None = None
        self._previous: dict[int, Any] = {}
        self._finished = threading.Event()

    def __enter__(self) -> SignalHandler:
        self._previous = {number: signal.getsignal(number) for number in SIGNALS}
        self.install()
        if self.processes.count > 1:
            self._wakeup = socket.socketpair()
            self._wakeup[1].setblocking(False)
            signal.set_wakeup_fd(self._wakeup[1].fileno())
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        if self.processes.count > 1:
            signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Make this object the handler of the signals."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def stop(self) -> NoReturn:
        """Raise `RunInterrupted` for the requested signal."""
        assert self.requested is not None
        raise RunInterrupted(self.requested, self._saved())

    def give_up(self, why: str = "") -> NoReturn:
        """Raise `PeerLost`, and ignore further signals of torchrun."""
        self._previous = dict.fromkeys(SIGNALS, signal.SIG_IGN)
        raise PeerLost(self.processes.rank, self._saved(), why)

    def _saved(self) -> Path | None:
        return self.checkpoint if self.checkpoint.exists() else None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            self.stop()
        self.requested = signum
        if not self.processes.main:
            return
        what = "this step" if self.processes.count == 1 else "a few steps"
        # Not `print`: the signal may interrupt another write to the same stream.
        with contextlib.suppress(OSError):
            os.write(2, f"\nfinishing {what}, then saving; repeat to stop immediately\n".encode())

    def _watch(self) -> None:
        """End this process some time after a signal if it has not ended by itself.

        The main thread may be waiting for a dead process in a call that handlers cannot interrupt.
        """
        self._wakeup[0].recv(1)
        if self._finished.wait(PATIENCE_SECONDS):
            return
        with contextlib.suppress(OSError):
            os.write(2, f"{PeerLost(self.processes.rank, self._saved())}\n".encode())
        os._exit(1)
