"""Networks that feed back, one time step after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spikefuse.neurons.checks import is_integer
from spikefuse.neurons.definition import States
from spikefuse.nn.call import TemporalCall, active, inside
from spikefuse.nn.checkpoint import called_inside
from spikefuse.nn.neuron import check_module
from spikefuse.nn.over_time import OnSequences
from spikefuse.nn.temporal import Temporal, layers_with_states
from spikefuse.scan.checks import call_untraced

#: The last outputs, and the states by name.
LoopState = tuple[tuple[Tensor, ...], dict[str, States]]


class Loop(OnSequences):
    """Any neurons and layers that see what they returned in the step before: populations that
    excite and inhibit each other, top-down feedback, winner-take-all.

    Equation, for the input `x` and the outputs `y`, which are 0 before the first step::

        y[t] = body(x[t], y[t - 1])

    Time is a Python loop of T calls of `body`, whose neurons and delays keep their states in
    between. Gradients flow through all steps. `sf.graph_step` records the loop, which removes the
    cost of the calls on a GPU; `Recurrent` takes one launch for a matrix. Inside `Temporal`, the
    last outputs are a state by the loop's name, and the layers in `body` have their own.

    Example::

        class Populations(nn.Module):               # excitation and inhibition
            def __init__(self):
                super().__init__()
                self.e, self.i = sf.LIF(0.9), sf.LIF(0.8)
                self.ee, self.ei, self.ie = nn.Linear(64, 64), nn.Linear(64, 16), nn.Linear(16, 64)

            def forward(self, x, e, i):             # [B, 64], the last spikes [B, 64] and [B, 16]
                new = self.e((x + self.ee(e) - self.ie(i)))
                return new, self.i(self.ei(new))

        loop = sf.Loop(Populations(), (64,), (16,))
        excitatory, inhibitory = loop(torch.rand(100, 4, 64))

    Args:
        body: a module from one step of the input, `[B, ...]`, and the last outputs to the new
            outputs, a tensor or a tuple. Each layer with a state is called once in a step. A batch
            norm in training mode takes the statistics of one step.
        shapes: the shape of each output, without B.

    Call: `y = loop(x, state=None, return_state=False)`

    Args:
        x: `[T, B, ...]`, inside `Temporal` `[T*B, ...]`.
        state: outputs and states after a call before, or None to start from rest; inside
            `Temporal`, pass it to the container.
        return_state: also return the final state.

    Returns:
        The outputs, a tensor or a tuple, each of the steps of `x`; with `return_state` a pair
        (outputs, state).

    Raises:
        TypeError, ValueError: an argument is not as described, or an output has another shape.
    """

    def __init__(self, body: nn.Module, *shapes: Sequence[int]) -> None:
        super().__init__()
        check_module("body", body)
        if any(isinstance(m, Temporal) for m in body.modules()):
            raise ValueError(
                "body contains a Temporal, which reads time, but a body is called for one step: "
                "put the layers of the Temporal in its place"
            )
        if not shapes:
            raise ValueError("shapes is empty: pass the shape of each output of body, without B")
        for shape in shapes:
            if not (isinstance(shape, Sequence) and all(is_integer(n, 1) for n in shape)):
                size = shape if is_integer(shape, 1) else 64
                raise TypeError(
                    f"a shape is {shape!r}: expected a tuple of the sizes of an output without B, "
                    f"such as ({size},)"
                )
        self.body, self.shapes = body, tuple(map(tuple, shapes))

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the last outputs; the states of the body are those of its layers."""
        return tuple(f"output{i}" for i in range(len(self.shapes)))

    def forward(  # type: ignore[override]
        self, x: Tensor, state: LoopState | None = None, return_state: bool = False
    ) -> Any:
        if state is None and not return_state:
            return super().forward(x)
        self._check([x])
        if not isinstance(state, tuple | None) or len(state or (0, 0)) != 2:
            raise TypeError(f"state is a {type(state).__name__}: expected one of an earlier call")
        last, states = state or ((), {})
        outputs, last, finals = call_untraced(self._run, x, last, states)
        return (outputs, (last, {**states, **finals})) if return_state else outputs

    def over_time(self, x: Tensor) -> Any:  # type: ignore[override]
        return call_untraced(self._run, x, (), {})[0]

    def extra_repr(self) -> str:
        return f"shapes={self.shapes}"

    def _over_time(self, inputs: Sequence[Tensor], call: TemporalCall | None) -> Any:
        if call is None or not call.has_states:
            return super()._over_time(inputs, call)
        name, states = call.name_of(self), call.initial or {}
        last = states.get(name, ())
        outputs, last, finals = call_untraced(self._run, *inputs, last, states, call.names)
        call.finals.update({**finals, name: last})
        return outputs

    def _run(
        self,
        x: Tensor,
        last: States,
        states: dict[str, States],
        names: dict[int, str] | None = None,
    ) -> tuple[Any, States, dict[str, States]]:
        """Return the outputs, those of the last step, and the final states by the layers' names.

        Args:
            last: the outputs of the step before; empty at rest.
            states: the states after it, by name.
            names: of the layers, by id; None for those in the body.
        """
        if names is None:
            layers = layers_with_states(self.body, in_loop=True)
            names = dict(zip(map(id, layers.values()), layers, strict=True))
            called_inside.update(layers.values())
        batch, finals, steps, outer = x.shape[1], dict[str, States](), [], active.call
        impl, policy, repeats = "auto", None, len(x)
        if outer is not None:
            impl, policy, repeats = outer.impl, outer.policy, len(x) * outer.repeats
        if last:
            last = self._outputs("the last outputs in state have", last, batch)
        else:
            last = tuple(x.new_zeros(batch, *shape) for shape in self.shapes)
        for now in x.unbind(0):
            initial = {**states, **finals} or None
            call = TemporalCall(
                1, names, batch, impl, initial, final=True, policy=policy, repeats=repeats
            )
            with inside(call):
                try:
                    found = self.body(now, *last)
                except Exception as error:
                    error.add_note(
                        f"The body of Loop was called with x {list(now.shape)} and its last "
                        f"outputs {[list(y.shape) for y in last]}, of the shapes given to Loop, "
                        "which must be those that body returns, one for each output"
                    )
                    raise
            last = self._outputs("body of Loop returned", found, batch)
            finals.update(call.finals)
            steps.append(last)
        outputs = tuple(map(torch.stack, zip(*steps, strict=True)))
        return outputs if len(outputs) > 1 else outputs[0], last, finals

    def _outputs(self, what: str, found: Any, batch: int) -> tuple[Tensor, ...]:
        """Return outputs as a tuple, if they have the shapes of this loop."""
        outputs = tuple(found) if isinstance(found, tuple | list) else (found,)
        expected = [[batch, *shape] for shape in self.shapes]
        for y in outputs:
            if not isinstance(y, Tensor):
                kind = type(y).__name__
                raise TypeError(f"{what} a {kind}: expected tensors of shapes {expected}")
        shapes = [list(y.shape) for y in outputs]
        if shapes != expected:
            raise ValueError(
                f"{what} shapes {shapes}: expected {expected}, B and the shapes given to Loop"
            )
        return outputs
