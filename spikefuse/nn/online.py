"""Networks that learn by rules whose memory does not grow with the number of time steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spikefuse.neurons.definition import States
from spikefuse.nn.call import observing
from spikefuse.nn.eligibility import Trace
from spikefuse.nn.learning import Learning
from spikefuse.nn.nesting import flatten, map_tensors, unflatten
from spikefuse.nn.over_time import OnSequences
from spikefuse.nn.temporal import Temporal
from spikefuse.scan.checks import call_untraced

RULES = ("bptt", "sltt", "ottt", "e-prop", "d-rtrl")
FEEDBACKS = ("symmetric", "random", "adaptive")


@dataclass(eq=False)
class Pending:
    """Whether the traces of a state, which a backward pass overwrites, are up to date.

    Attributes:
        names: of the neurons whose traces are not.
        traces: of the state.
    """

    names: set[str]
    traces: dict[str, list[Trace]]


class OnlineState(NamedTuple):
    """What an `Online` carries from one part of a sequence to the next.

    Attributes:
        states: of the neurons, in the form of `Temporal`.
        traces: the eligibility traces by neuron, for each source of parameters and each state.
        rule: of the `Online`.
        pending: which traces are out of date; None unless `in_place`.
    """

    states: dict[str, States]
    traces: dict[str, list[Trace]]
    rule: str
    pending: Pending | None


class Online(nn.Module):
    """Train a network by a rule that needs no gradients through its whole past.

    The outputs are those of the network. Gradients, which ordinary losses and optimizers use, are
    those of a rule. With the error `L[t]` at the spikes of a layer, which arrives through the later
    layers of the same time step, the gradient of the parameters `m` of this layer is::

        dE/dm = sum_t L[t] (ds[t]/dv[t-1] e[t-1] + ds[t]/dm)
        e[t] = J[t] e[t-1] + dv[t]/dm              eligibility trace

    for the states `v` of a neuron. The rules differ in `J[t]`, the derivative of the new states of
    a neuron by its old ones:

    - `"d-rtrl"`: all of it. No terms are dropped for one layer without recurrent weights.
    - `"e-prop"`: without the reset, as with `detach_reset=True`.
    - `"ottt"`: as if no neuron had spiked, so that only the leak remains.
    - `"sltt"`: 0. Only the present time step counts.
    - `"bptt"`: ordinary backpropagation within each call, so truncated between calls.

    Of a neuron of your own, "ottt" leaves out the spikes that a `Surrogate` among its attributes
    emits, and "e-prop" the reset that its `step` detaches if its attribute `detach_reset` is True.
    Neurons that spike in another way are refused.

    All but "bptt" drop what passes through recurrent weights from one step to the next, and
    through the states of one layer to the parameters of another.

    A sequence may come whole or in parts of any number of steps: `state` then carries the states
    and the traces, so that gradients of a part reach back to the beginning. Parts give the same
    gradients as the whole sequence if parameters do not change in between. The memory is that of
    one part, and of the traces: `[B, inputs]` for each layer and state where `J` and `dv/dx` are
    the same for all neurons and steps, as for "ottt" of an LIF, else `[B, outputs, inputs]`, at
    each position of a convolution.

    Example::

        net = sf.Temporal(nn.Sequential(nn.Linear(40, 64), sf.LIF(0.9), nn.Linear(64, 2)))
        learner, state = sf.Online(net, rule="ottt"), None
        optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
        x, labels = torch.rand(100, 8, 40), torch.randint(2, (8,))
        for step in x.split(1):                 # updates at each step
            y, state = learner(step, state=state, return_state=True)
            nn.functional.cross_entropy(y[0], labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    Args:
        net: the network.
        rule: see above.
        feedback: how the error of the last `nn.Linear` reaches the layers below: "symmetric", by
            its weight; "random", by a fixed random matrix; "adaptive", by a matrix that receives
            the gradient of the weight, and so approaches it if the optimizer has weight decay. The
            layer must be the last one of its kind to run.
        in_place: let `backward()` overwrite the traces of the state that a call has received, in
            place of holding those before and after a part. Then call it on the outputs of each part
            before the next one, except under `torch.no_grad()`, and pass each state to one call.

    Call: as of `Temporal`.

    Args:
        state: what the call for the steps before has returned, or None to start from rest.
        return_state: also return the state after these steps, an `OnlineState`.

    Raises:
        RuntimeError: with `in_place`, the traces of the state are out of date, or were replaced.
        TypeError, ValueError: an argument is not as described; the network has a layer that sees
            all time steps, an `EventLinear` or a `Block`, or a neuron that the rule cannot change,
            see above; `spikefuse.record` with `grad=True` is around a call by a rule other than
            "bptt" and "sltt"; the state is of another rule, or of other learned parameters; with
            `in_place`, the state is of an `Online` without it; with `feedback`, the last
            `nn.Linear` is not the last one to run; in parts, parameters reach a neuron through
            other layers than one linear layer or convolution that is not transposed, or through a
            hook or function that may change gradients; or a rule with traces runs in
            `torch.inference_mode()`.

    Sources: Meng et al., "Towards Memory- and Time-Efficient Backpropagation for Training Spiking
    Neural Networks", ICCV 2023 ("sltt"); Xiao et al., "Online Training Through Time for Spiking
    Neural Networks", NeurIPS 2022 ("ottt"); Bellec et al., "A solution to the learning dilemma for
    recurrent networks of spiking neurons", Nature Communications 11, 2020 ("e-prop", and feedback);
    Wang et al., "Model-agnostic linear-memory online learning in spiking neural networks", Nature
    Communications 17, 2026 ("d-rtrl").
    """

    def __init__(
        self, net: Temporal, rule: str, feedback: str = "symmetric", in_place: bool = False
    ) -> None:
        super().__init__()
        if not isinstance(net, Temporal):
            raise TypeError(f"net is a {type(net).__name__}: expected a Temporal")
        for name, value, known in (("rule", rule, RULES), ("feedback", feedback, FEEDBACKS)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}: expected one of {', '.join(known)}")
        for name, module in net.named_modules() if rule != "bptt" else ():
            layer = f"layer '{name}' ({type(module).__name__})"
            if isinstance(module, OnSequences):
                raise ValueError(
                    f"{layer} sees all time steps, so that its errors are not of one time step as "
                    f"'{rule}' needs: use rule='bptt'"
                )
            is_event = any(cls.__name__ == "EventLinear" for cls in type(module).__mro__)
            if is_event and module.neuron is not None:
                raise ValueError(f"{layer} runs its neuron itself: use nn.Linear and the neuron")
        if net.passing is not None:
            raise ValueError("the time of the network is sharded: use a copy that is not")
        self.net, self.rule, self.feedback, self.in_place = net, rule, feedback, in_place
        if feedback != "symmetric":
            matrix = torch.empty_like(_last_linear(net).weight)
            nn.init.kaiming_uniform_(matrix, a=5**0.5)  # as nn.Linear's
            #: In place of the weight of the last linear layer, for what its error becomes below.
            self.matrix = nn.Parameter(matrix, requires_grad=feedback == "adaptive")

    def extra_repr(self) -> str:
        return f"rule={self.rule!r}, feedback={self.feedback!r}, in_place={self.in_place}"

    def forward(
        self,
        *inputs: Any,
        state: OnlineState | None = None,
        return_state: bool = False,
        impl: str = "auto",
        **kwargs: Any,
    ) -> Any:
        if not isinstance(state, OnlineState | None):
            raise TypeError(f"state is a {type(state).__name__}: expected what Online returned")
        if state is not None and state.rule != self.rule:
            raise ValueError(
                f"state is of rule '{state.rule}', but this Online learns by '{self.rule}': start "
                "from state=None, or use one rule for all parts of a sequence"
            )
        states, traces = (None, {}) if state is None else (state.states, state.traces)
        pending: set[str] = set()
        options = {"state": states, "return_state": return_state, "impl": impl}
        in_parts = return_state or (state is not None and torch.is_grad_enabled())
        has_traces = in_parts and self.rule not in ("bptt", "sltt")
        if has_traces and torch.is_inference_mode_enabled():
            raise ValueError(
                f"rule '{self.rule}' differentiates neurons for the traces that return_state=True "
                "returns, which torch.inference_mode() prevents: use torch.no_grad()"
            )
        if has_traces and state is not None:
            _check_traces(state, self.in_place)
        with self._broadcast():
            if self.rule == "bptt" or not (torch.is_grad_enabled() or has_traces):
                found = self.net(*inputs, **options, **kwargs)
            else:
                matrix = self.matrix if self.feedback == "adaptive" else None
                in_place = self.in_place and torch.is_grad_enabled()
                before = traces if has_traces else None
                learning = Learning(self.net, self.rule, before, matrix, in_place)
                found = call_untraced(self._learn, learning, inputs, kwargs, options)
                traces, pending = learning.traces_after, learning.pending
        if not return_state:
            return found
        y, states = found
        detached = {name: tuple(s.detach() for s in own) for name, own in states.items()}
        if state is not None and state.pending is not None:
            state.pending.names.update(pending)  # from here on, backward may overwrite its traces
        is_overwritten = has_traces and self.in_place
        marks = Pending(pending, traces) if is_overwritten else None
        return y, OnlineState(detached, traces, self.rule, marks)

    def _learn(self, learning: Learning, inputs: Any, kwargs: Any, options: dict[str, Any]) -> Any:
        args, kwargs = map_tensors(learning.leaf, (inputs, kwargs))
        has_gradients = torch.is_grad_enabled()
        layers = learning.layers or contextlib.nullcontext()
        with layers, observing(learning), torch.enable_grad():
            found = self.net(*args, **options, **kwargs)
        output = found[0] if options["return_state"] else found
        values, structure = flatten(output)
        values = learning.joined(values)
        if not has_gradients:
            values = [y.detach() if isinstance(y, Tensor) else y for y in values]
        output = unflatten(values, structure)
        return (output, found[1]) if options["return_state"] else output

    @contextlib.contextmanager
    def _broadcast(self) -> Iterator[None]:
        """Let the error of the last linear layer go on through another matrix in a `with` block."""
        if self.feedback == "symmetric":
            yield
            return
        inputs: list[Tensor] = []
        ran: list[Any] = []

        def before(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            inputs.append(args[0])
            return (args[0].detach(),)

        def after(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
            return _Broadcast.apply(inputs.pop(), y, self.matrix)

        readout = _last_linear(self.net)
        linear = {m: n for n, m in self.net.named_modules() if isinstance(m, nn.Linear)}
        with contextlib.ExitStack() as hooks:
            hooks.enter_context(readout.register_forward_pre_hook(before))
            hooks.enter_context(readout.register_forward_hook(after))
            for layer in linear:
                hooks.enter_context(layer.register_forward_hook(lambda m, *_: ran.append(m)))
            yield
        if ran[-1:] != [readout]:
            found = f"'{linear[ran[-1]]}' was the last one to run" if ran else "none ran"
            raise ValueError(
                f"feedback='{self.feedback}' replaces the weight of '{linear[readout]}', the last "
                f"nn.Linear of the network, but {found}: register the layers in the order in which "
                "they run, or use feedback='symmetric'"
            )


def _check_traces(state: OnlineState, in_place: bool) -> None:
    """Raise an error if the traces of a state are out of date, or may not be overwritten."""
    if state.pending is None:
        if in_place:
            raise ValueError(
                "state is of an Online without in_place=True, and backward() would overwrite its "
                "traces: pass a state that an Online with in_place=True has returned, or None"
            )
        return
    if state.pending.names:
        raise RuntimeError(
            f"the traces of neuron '{min(state.pending.names)}' in state are out of date: "
            "backward() has not run on the outputs that came with this state, or another call has "
            "used it. With in_place=True, call backward() on the outputs of each part before the "
            "next one, or run the part under torch.no_grad(), and pass the state that the last "
            "call has returned"
        )
    if state.pending.traces is not state.traces:
        raise RuntimeError(
            "the traces of state are not the tensors that backward() has overwritten, but copies "
            "that may be older: with in_place=True, pass the state as it was returned, and change "
            "traces in place, after backward()"
        )


class _Broadcast(torch.autograd.Function):
    """`y`, computed from x by a linear layer, whose gradient reaches x through another matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrix)
        ctx.keeps_gradient = True  # of y
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, matrix = ctx.saved_tensors
        learned = None
        if ctx.needs_input_grad[2]:
            learned = grad.flatten(0, -2).mT @ x.flatten(0, -2)
        return grad @ matrix.to(grad.dtype), grad, learned


def _last_linear(net: nn.Module) -> nn.Linear:
    layers = [module for module in net.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise ValueError("the network has no nn.Linear, whose error feedback would pass on")
    return layers[-1]
