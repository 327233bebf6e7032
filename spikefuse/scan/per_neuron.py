"""Parameters with more dims than one value per channel: each neuron of a sample is a channel."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from spikefuse._torch import is_traced
from spikefuse.neurons.definition import channel_view
from spikefuse.scan.records import Arguments, Results


def flattened(
    arguments: Arguments[Tensor],
) -> tuple[Arguments[Tensor], Callable[[Results[Tensor]], Results[Tensor]]]:
    """Return the arguments with samples of one dim, in the order of memory, and a function that
    gives results the shape of the inputs again."""
    x = arguments.inputs[0]
    shape = x.shape[2:]
    order = [*range(len(shape))]
    if not is_traced():  # TorchDynamo cannot sort symbols
        order.sort(key=lambda d: -x.stride(d + 2))
    back = [order.index(d) for d in range(len(shape))]

    def fold(t: Tensor, first: int) -> Tensor:
        return t.permute(*range(first), *(first + d for d in order)).flatten(first)

    def unfold(t: Tensor, first: int) -> Tensor:
        dims = t.unflatten(first, [shape[d] for d in order])
        return dims.permute(*range(first), *(first + d for d in back))

    def restore(results: Results[Tensor]) -> Results[Tensor]:
        outputs = [unfold(y, 2) for y in results.outputs]
        return results._replace(outputs=outputs, finals=[unfold(v, 1) for v in results.finals])

    folded = arguments._replace(
        inputs=[fold(t, 2) for t in arguments.inputs],
        states=arguments.states and [fold(t, 1) for t in arguments.states],
        params=[
            fold(channel_view("", p, x.shape[1:]).expand(shape), 0) if p.ndim else p
            for p in arguments.params
        ],
    )
    return folded, restore
