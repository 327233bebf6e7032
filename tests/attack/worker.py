"""The process that runs cases, on one to three threads.

Small inputs are fused and shared among threads as large ones are.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from multiprocessing.connection import Connection


def work(connection: Connection, folder: str) -> None:
    """Run cases, each a kind and a seed, until the connection is closed."""
    os.environ["OMP_WAIT_POLICY"] = "passive"  # there may be more threads than cores
    import torch

    from spikefuse.graph import fuse_norms
    from spikefuse.kernels import numba_host

    numba_host.MIN_TASK = 1
    fuse_norms.MIN_VALUES = 0
    os.chdir(folder)
    sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    warnings.simplefilter("ignore")
    while True:
        try:
            kind, seed = connection.recv()
        except EOFError:
            return
        torch.set_num_threads(1 + seed % 3)
        try:
            found = importlib.import_module(f"tests.attack.{kind}").case(seed)
        except Exception:
            found = [traceback.format_exc(limit=-6)]
        connection.send(found)
