"""What a scan gets, what is wanted of it, and what it returns: one record each.

They travel unchanged from the layer that calls a scan to the launch of its kernel. Backward uses
the same records: it gets gradients of `Results`, and returns gradients of `Arguments`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from spikefuse.scan.state_passing import StatePassing

Tensors = Sequence[Tensor]
MaybeTensors = Sequence[Tensor | None]
T = TypeVar("T")


class Arguments(NamedTuple, Generic[T]):
    """What a scan gets.

    Its tensors may be replaced by their gradients, or by flags that say which need gradients.

    Attributes:
        inputs: `[T, B, ...]` each.
        states: the initial states, `[B, ...]` each; None or empty to start from rest.
        params: the tensors that the step reads, in the order of the program.
        prologue: the tensors of what is computed before the step: of batch norms, see
            `spikefuse.block.training`, or of feedback, see `spikefuse.scan.recurrent`.
        scalars: the floats that the step reads, in the order of the program.
        passing: where the first state comes from and where the last one goes; None for `states`.
    """

    inputs: Sequence[T]
    states: Sequence[T] | None = None
    params: Sequence[T] = ()
    prologue: Sequence[T] = ()
    scalars: Sequence[float] = ()
    passing: StatePassing | None = None


class Wanted(NamedTuple):
    """What is wanted of a scan.

    Attributes:
        final: whether to return the final states.
        bits: whether to return binary outputs as bits, too, if kernels can write them.
        save: whether to save the states that backward would recompute otherwise.
        outputs: names of the outputs and states to return over time; empty for all outputs.
        impl: "triton" or "numba"; for layers also "reference" or "auto".
    """

    final: bool = False
    bits: bool = False
    save: bool = True
    outputs: tuple[str, ...] = ()
    impl: str = "auto"


class Results(NamedTuple, Generic[T]):
    """What a scan returns. Its tensors may be replaced by their gradients.

    Attributes:
        outputs: `[T, B, ...]` each.
        finals: the final states, `[B, ...]` each; empty if not wanted.
        saved: what backward reads besides the arguments, such as the states before each chunk of
            steps, `[chunks - 1, N]` each.
        bits: one uint8 tensor for each binary output, one bit per value in the order of memory.
        binary: for each output, whether all its values are sure to be 0 or 1.
    """

    outputs: Sequence[T]
    finals: Sequence[T] = ()
    saved: Sequence[T] = ()
    bits: Sequence[Any] = ()
    binary: tuple[bool, ...] = ()
