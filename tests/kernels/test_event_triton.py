"""Products with events on GPUs, in the interpreter."""

from __future__ import annotations

import os

import pytest

from tests.kernels.products import check


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 33), (40, 600)])
def test_products(inputs: int, outputs: int) -> None:
    from spikefuse.kernels import event_triton

    check(event_triton, inputs, outputs)
