"""The container that runs a network written for one time step over a sequence."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spikefuse._torch import Modules, is_traced
from spikefuse.kernels.norm import BatchNorm, by_batch
from spikefuse.kernels.triton_runtime import prepare
from spikefuse.memory.policies import Checkpoint, Policy, Recompute
from spikefuse.neurons.checks import check_tensor
from spikefuse.neurons.definition import Neuron, States
from spikefuse.nn.call import TemporalCall, inside
from spikefuse.nn.checkpoint import called_inside
from spikefuse.nn.nesting import map_tensors, map_values, named_values
from spikefuse.nn.neuron import IMPLEMENTATIONS, check_module
from spikefuse.nn.over_time import OnSequences, OverTime
from spikefuse.nn.reading import from_forward, note_on
from spikefuse.nn.symbolic import leaf
from spikefuse.scan.checks import refuse_export
from spikefuse.scan.layout import flatten_steps
from spikefuse.scan.state_passing import StatePassing

#: Layers that remember something from one call to the next.
RECURRENT = (nn.RNNBase, nn.RNNCellBase)

#: Layers that may read dim 0 as a sequence.
SEQUENTIAL = (*RECURRENT, nn.MultiheadAttention)

#: Layers that compute along their dim `dim`, which is dim 0 for some inputs if it is None.
ALONG_DIM = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.CosineSimilarity)

#: Base classes of the layers of other libraries that do, by package.
FOREIGN = {
    "norse": ("SNN", "SNNCell", "SNNRecurrent", "SNNRecurrentCell", "LILinearCell", "CobaLIFCell"),
    "snntorch": ("SpikingNeuron",),
    "spikingjelly": ("MemoryModule",),
}

#: Classes of the layers at which `layers_with_states` looks.
LAYERS = (Neuron, OnSequences, *SEQUENTIAL)


class SparseSequence(Protocol):
    """A sequence of T steps and B samples in a format of its own, such as `spikefuse.nn.Events`.

    `Temporal` passes it to its network unchanged; its layers know the format.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """(T, B, ...)."""
        ...

    @property
    def device(self) -> torch.device: ...

    def sequence_signature(self) -> tuple[Hashable, ...]:
        """Return what determines the memory saved for backward, except for the data."""
        ...


class Temporal(nn.Module):
    """Run `net`, written for one time step, over `[T, B, ...]`.

    Time is folded into the batch for stateless layers, so each layer runs once per call on
    `[T*B, ...]`; the neurons inside receive T. Normalization layers see all time steps at once
    (their statistics run over T and B), and dropout draws a new mask at each step.

    With `batch_first=True`, inputs and outputs are `[B, T, ...]` and states are unchanged. Inputs
    are transposed as views. Folding one of them into `[T*B, ...]` copies it once, unless T or B is
    1 or its memory is time first; outputs are views whose memory is time first.

    A layer that remembers something from one call to the next gives wrong results here, because it
    is called once for all T steps: `torch.nn`'s recurrent layers are refused. Run them between two
    containers, `nn.Sequential(Temporal(...), rnn, Temporal(...))`. Neurons of SpikingJelly,
    snnTorch and Norse in `nn.Sequential` are refused, too: `sf.convert` replaces them. A layer that
    computes along dim 0 mixes steps and samples: attention of `torch.nn` needs `batch_first=True`.

    In a network of `spikefuse.fuse`, an input that is the same at each step (its time has stride 0,
    as from `encode.direct`) and needs no gradient goes through deterministic layers before the
    first neuron once, as `[B, ...]`. The result is the same up to rounding, running statistics
    included. Forward hooks and the code of the network see tensors `[T*B, ...]`.

    Example::

        net = sf.Temporal(nn.Sequential(nn.Linear(784, 128), sf.LIF(), nn.Linear(128, 10)))
        logits = net(torch.rand(8, 32, 784)).mean(0)  # [32, 10]

    Args:
        net: the network.
        memory: what is saved for backward, a policy of `spikefuse.memory`; None for `Recompute()`.
        batch_first: whether inputs and outputs are `[B, T, ...]` instead of `[T, B, ...]`.

    Call: `Temporal(net)(*inputs, state=None, return_state=False, impl="auto", **kwargs)`

    Args:
        inputs, kwargs: the arguments of the network, in any nesting of tuples, lists and dicts.
            Each tensor is `[T, B, ...]`, with the same T and B; or `Events` of T steps and B
            samples for a network that begins with an `EventLinear`. Other objects are passed on as
            they are. With time sharding, exactly one argument is a tensor.
        state: the state that an earlier call returned, or None to start from rest.
        return_state: also return the final state, a dict from the name of each neuron, delay, loop
            and layer with a history in `named_modules()`, such as "net.1", to its tuple of states;
            passed as `state=` to the next call, it continues the sequence. A layer that was not
            called has the state that it began with, at rest an empty tuple.
        impl: how neurons are computed; see `Neuron`.

    Returns:
        The network's output with dim 0 unfolded to `[T, B, ...]` (tensors in any such nesting), and
        with `return_state` a pair (output, state).

    Raises:
        TypeError, ValueError: wrong shapes, states that do not belong to this network, or a layer
            with a memory of its own or along dim 0; in `nn.Sequential`, one of another library or
            with `dim=0` is refused when a `Temporal` is made. An error inside the network has a
            note that says how the inputs were read if they do not fit its first layer.
    """

    def __init__(
        self,
        net: nn.Module,
        memory: Policy | None = None,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        check_module("net", net)
        if any(isinstance(m, Temporal) for m in net.modules()):
            raise ValueError("a Temporal inside a Temporal: wrap the outermost network only")
        _refuse_in_sequential("net", net)
        if not isinstance(memory, Policy | None):
            hint = "; wrap layers in nn.Sequential" if isinstance(memory, nn.Module) else ""
            raise TypeError(
                f"memory is {memory!r}: expected None or a policy of spikefuse.memory (SaveAll(), "
                f"Recompute(), Bits() or Checkpoint()){hint}"
            )
        self.net = net
        self.memory: Policy = memory or Recompute()
        self.batch_first = batch_first
        #: Connects the neurons to processes that hold other steps of a sequence.
        self.passing: StatePassing | None = None
        #: Runs `run_folded` as a fused graph, see `spikefuse.fuse`; None to call it.
        self.captured: Callable[..., Any] | None = None
        #: Lists the layers inside that may have states.
        self.listed = Modules(LAYERS, "net")

    def extra_repr(self) -> str:
        shown = ["batch_first=True"] if self.batch_first else []
        if self.memory != Recompute():
            shown.append(f"memory={self.memory}")
        return ", ".join(shown)

    def neurons(self) -> dict[str, Neuron]:
        """The neurons inside, by their name in `named_modules()`."""
        return {n: m for n, m in layers_with_states(self.net).items() if isinstance(m, Neuron)}

    @leaf
    def forward(
        self,
        *inputs: Any,
        state: dict[str, States] | None = None,
        return_state: bool = False,
        impl: str = "auto",
        **kwargs: Any,
    ) -> Any:
        traced = is_traced()
        modules, listed = ([], None) if traced else self.listed.of(self.net)
        layers = layers_with_states(self.net, listed=listed)
        sequences = self._sequences(inputs, kwargs)
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl is {impl!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
        if state is not None:
            check_state(state, layers)
        num_steps, batch = sequences[0].shape[:2]
        if self.batch_first:
            num_steps, batch = batch, num_steps
        names = dict(zip(map(id, layers.values()), layers, strict=True))
        call = TemporalCall(num_steps, names, batch, impl, state, return_state)
        call.passing, call.policy = self.passing, self.memory
        call.network, call.modules = self.net, modules
        if not traced:
            called_inside.update(layers.values())
        if call.passing is not None:
            self._begin(call.passing, sequences, call)
        args: Sequence[Any] = inputs
        if self.batch_first:
            args, kwargs = map_tensors(_swap_dims, (args, kwargs))
        if not traced and sequences[0].device.type == "cuda":
            prepare()
        capture = type(self.memory).capture
        if self.captured is None and capture is not None and not traced:
            self.captured = capture()
        captured = None if impl == "reference" else self.captured
        is_graph = traced or captured is not None
        try:
            with inside(call, self.memory.packs_spikes and not is_graph):
                if is_graph:
                    folded = run_captured(captured, run_folded, self.net, args, kwargs)
                else:
                    folded = run_folded(self.net, args, kwargs)
        except Exception as error:
            if traced:
                raise
            order = "[B, T, ...]" if self.batch_first else "[T, B, ...]"
            note = note_on(error, self.net, sequences, num_steps, batch, order)
            if note:
                error.add_note(note)
            raise from_forward(self.net, error)  # noqa: B904 (it is the same error)
        if call.passing is not None:
            call.passing.end()

        unfold = partial(self._unfold, num_steps, batch, folded)
        output = unfold(folded) if isinstance(folded, Tensor) else map_values(unfold, folded)
        if not return_state:
            return output
        for name in layers:
            call.finals.setdefault(name, () if state is None else state[name])
        return output, call.finals

    def _unfold(self, num_steps: int, batch: int, output: Any, y: Any) -> Any:
        """The leaf `y` of the network's output, as `[T, B, ...]`."""
        if not isinstance(y, Tensor):
            if self.batch_first and hasattr(y, "sequence_signature"):
                raise _time_first(y)
            return y
        if y.ndim == 0 or y.shape[0] != num_steps * batch:
            reason = "a layer has mixed the batch with other dims"
            if y.ndim == 0:
                reason = "compute a number for the whole call from the outputs, outside"
            raise ValueError(
                f"the network returned shape {list(y.shape)}{_place(y, output)}: expected dim 0 to "
                f"be T*B = {num_steps}*{batch}; {reason}"
            )
        # Inlined from `unflatten_steps`, since every call of every network runs it.
        y = y.unsqueeze(0) if num_steps == 1 else y.unflatten(0, (num_steps, batch))
        return y.transpose(0, 1) if self.batch_first else y

    def _begin(
        self,
        passing: StatePassing,
        sequences: Sequence[Tensor | SparseSequence],
        call: TemporalCall,
    ) -> None:
        x = sequences[0]
        if len(sequences) > 1:
            raise ValueError(
                f"{len(sequences)} sequences are given to a network whose time is sharded: "
                "expected one; concatenate them along the channels"
            )
        if not isinstance(x, Tensor):
            raise ValueError(
                f"x is {type(x).__name__}: the time of a network on events cannot be sharded"
            )
        if call.impl == "reference":
            raise ValueError(
                'impl is "reference", whose loop has all steps in one process: choose "auto" for a '
                "network whose time is sharded"
            )
        mode = "training" if self.training else "evaluation"
        gradients = "with" if torch.is_grad_enabled() else "without"
        wanted = ", x requires grad" if x.requires_grad else ""
        memory = f", {self.memory}" if isinstance(self.memory, Checkpoint) else ""
        about = f"{type(self.net).__name__} in {mode} {gradients} gradients{wanted}{memory}"
        x = x.transpose(0, 1) if self.batch_first else x
        passing.begin(x, about, call.initial is not None)

    def _sequences(
        self, inputs: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[Tensor | SparseSequence]:
        """The sequences among the arguments, after checking that they agree in T and B."""
        values = inputs
        if kwargs or len(inputs) != 1 or not isinstance(inputs[0], Tensor):
            values = [x for _, x in named_values((inputs, kwargs))]
        sequences: list[Tensor | SparseSequence] = []
        expected = "[B, T, ...]" if self.batch_first else "[T, B, ...]"
        for i, x in enumerate(values):
            if not isinstance(x, Tensor):
                if not hasattr(x, "sequence_signature"):
                    continue
                if self.batch_first:
                    raise _time_first(x)
            elif x.layout is not torch.strided or x.is_nested:
                check_tensor("the input", x, f" {expected}")
            if sequences and x.shape[:2] != sequences[0].shape[:2]:
                # The exporters before torch.export pass defaults of keyword arguments as tensors.
                refuse_export()
                name = _names(inputs, kwargs)[i]
                raise ValueError(
                    f"{name} has shape {list(x.shape)}: expected {expected} with the "
                    f"same T and B as the first tensor {list(sequences[0].shape)}; expand a tensor "
                    "that is the same at each step, see spikefuse.nn.encode.direct, or make it an "
                    "attribute of the network; state is a keyword argument"
                )
            if len(x.shape) < 2 or x.shape[self.batch_first] == 0:
                raise ValueError(
                    f"the input has shape {list(x.shape)}: expected {expected} with T >= 1; for a "
                    f"single step use x.unsqueeze({int(self.batch_first)})"
                )
            sequences.append(x)
        if not sequences:
            kinds = [f"a {type(x).__name__}" for x in (*inputs, *kwargs.values())]
            description = " and ".join(kinds) or "missing"
            raise TypeError(f"the input is {description}: expected a tensor {expected}")
        return sequences


def run_captured(
    captured: Callable[..., Any] | None,
    function: Callable[..., Any],
    net: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Run `function(net, args, kwargs)` as a fused graph, unless it is traced itself."""
    traced = is_traced() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    if captured is None or traced or torch.compiler.is_exporting():
        return function(net, args, kwargs)
    return captured(function, net, args, kwargs)


def run_folded(net: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call `net`, written for one time step, on sequences `[T, B, ...]` folded into the batch."""
    if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
        return net(flatten_steps(args[0]))
    args, kwargs = map_tensors(flatten_steps, (args, kwargs))
    return net(*args, **kwargs)


def _swap_dims(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def layers_with_states(
    net: nn.Module,
    one_step: bool = False,
    in_loop: bool = False,
    listed: Iterable[tuple[str, nn.Module]] | None = None,
) -> dict[str, Neuron | OnSequences]:
    """The neurons in `net`, and other layers that carry a state, by their qualified name in a
    `Temporal` of it, such as "net.1".

    Args:
        one_step: whether `net` runs a single step, where batch norms cannot take statistics.
        in_loop: whether `net` passes the states of cells of torch.nn on itself.
        listed: the `LAYERS` in `net`, and with `one_step` its batch norms, if they are known.

    Raises:
        TypeError: a layer of torch.nn has a memory of its own.
        ValueError: a layer of attention reads dim 0 as a sequence, or, with `one_step`, a batch
            norm takes its statistics from its input.
    """
    layers: dict[str, Neuron | OnSequences] = {}
    # Where dim 0 is time, any layer may run, and within a loop over time a cell.
    allowed: list[tuple[str, tuple[type, ...]]] = [("net", (nn.RNNCellBase,))] if in_loop else []
    for name, module in net.named_modules(prefix="net") if listed is None else listed:
        if isinstance(module, OnSequences):
            kinds = SEQUENTIAL if isinstance(module, OverTime) else (nn.RNNCellBase,)
            allowed.append((f"{name}.", kinds))
        if isinstance(module, Neuron) or (isinstance(module, OnSequences) and module.state_names):
            layers[name] = module
        elif isinstance(module, SEQUENTIAL):
            if not any(name.startswith(n) and isinstance(module, k) for n, k in allowed):
                _refuse_sequential(name, module)
        elif one_step and isinstance(module, BatchNorm) and by_batch(module):
            raise ValueError(
                f"batch norm '{name}' would take the statistics of a single step: call "
                "net.eval(), and set track_running_stats=True"
            )
    return layers


def _refuse_sequential(name: str, layer: nn.Module) -> None:
    """Raise an error for a layer that reads dim 0, steps and samples, as a sequence."""
    layer_name = f"layer '{name}' ({type(layer).__name__})"
    if not isinstance(layer, nn.MultiheadAttention):
        raise TypeError(
            f"{layer_name} has a memory of its own, but the layers here are called once for all "
            "time steps: run it in an OverTime, a cell in a Loop, or outside, as in "
            "nn.Sequential(Temporal(...), rnn, Temporal(...))"
        )
    if not layer.batch_first:
        raise ValueError(
            f"{layer_name} has batch_first=False, so that it reads dim 0, which has steps and "
            "samples here, as the sequence: create it, or the nn.Transformer layer around it, with "
            "batch_first=True, for inputs [B, N, ...]"
        )


def _refuse_in_sequential(name: str, module: nn.Module) -> None:
    """Refuse layers in `nn.Sequential` that mix steps and samples, and neurons of other libraries,
    which are called once there. Other modules may call them in another way."""
    if isinstance(module, ALONG_DIM) and module.dim in (0, None):
        raise ValueError(
            f"layer '{name}' ({type(module).__name__}) has dim={module.dim}, but dim 0 has steps "
            "and samples here: set the dim of channels, such as dim=1 or dim=-1"
        )
    for cls in type(module).__mro__:
        library = cls.__module__.partition(".")[0]
        if cls.__name__ in FOREIGN.get(library, ()):
            raise TypeError(
                f"layer '{name}' ({library}.{type(module).__name__}) has a memory of its own, but "
                "the layers here are called once for all time steps: replace it first, by "
                "Temporal(spikefuse.convert(net))"
            )
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        for key, child in module.named_children():
            _refuse_in_sequential(f"{name}.{key}", child)


def check_state(state: dict[str, States], layers: Mapping[str, nn.Module]) -> None:
    """Refuse states that are not those of all `layers`."""
    if not isinstance(state, dict):
        raise TypeError(
            f"state is a {type(state).__name__}: expected a dict, as return_state=True returns"
        )
    if state.keys() != layers.keys():
        raise ValueError(
            f"state has entries for ({', '.join(state)}): expected ({', '.join(layers)}), as "
            "return_state=True returned"
        )
    for name, states in state.items():
        if isinstance(states, Tensor):
            raise TypeError(f"state[{name!r}] is a tensor: expected a tuple of tensors")


def _names(inputs: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """The names of all values of the arguments, such as "input 1" or "mask['key']"."""
    named = [*((f"input {i}", x) for i, x in enumerate(inputs)), *kwargs.items()]
    return [name for start, x in named for name, _ in named_values(x, start)]


def _place(y: Tensor, output: Any) -> str:
    """Where a tensor is in a nested output, as " as output['loss']"; empty for a single one."""
    (path, *_) = (path for path, value in named_values(output) if value is y)
    return f" as output{path}" if path else ""


def _time_first(x: Any) -> ValueError:
    return ValueError(
        f"batch_first=True and {type(x).__name__}, which are time first: use a Temporal without "
        "batch_first"
    )
