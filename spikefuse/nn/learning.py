"""How one call of a network learns by a rule: its graph is cut at each neuron.

A neuron gives its inputs two gradients. That through its states goes to the parameters of the
layers in front of it, up to the neurons before; that of the same time step goes on to these
neurons. So backward goes through the pieces of the graph one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spikefuse import reference
from spikefuse._torch import version, without_hooks
from spikefuse.neurons.definition import FIRST_OUTPUT, Neuron, channel_view
from spikefuse.neurons.online import INPUT, OnlineNeuron, online_neuron, with_gradient_of
from spikefuse.neurons.per_step import with_inputs
from spikefuse.neurons.surrogate import Surrogate
from spikefuse.nn.call import Observer, Scan, active
from spikefuse.nn.eligibility import Layers, Source, Trace, constant, differentiate
from spikefuse.nn.feedback import Feedback
from spikefuse.nn.neuron import from_rest, scan_neuron
from spikefuse.nn.recurrent import Recurrent
from spikefuse.scan.kinds import kinds_of
from spikefuse.scan.layout import flatten_steps, unflatten_steps
from spikefuse.scan.program import StateFlow, prepare
from spikefuse.scan.records import Arguments, Results, Wanted

MaybeTensors = Sequence[Tensor | None]


class Cut(NamedTuple):
    """A neuron, where the graph is cut.

    Attributes:
        received: its inputs and first states, with the graph of the layers in front of it.
        leaves: the same without a graph; their gradients are those through the states.
        twins: the inputs once more; their gradients are those of the same time step.
        results: its outputs.
        outputs: the same without a graph, as later layers read them.
        sources: of its inputs, and their traces before the call.
        versions: of these traces.
        update: the arguments by which `_update` overwrites them; None if that is done.
    """

    received: list[Tensor]
    leaves: list[Tensor]
    twins: list[Tensor]
    results: list[Tensor]
    outputs: list[Tensor]
    sources: list[tuple[Source, Trace]]
    versions: list[int]
    update: tuple[Any, ...] | None


class Learning(Observer):
    """One call of a network that learns.

    Attributes:
        traces: by neuron, before the call; None for a whole sequence, which needs none.
        traces_after: by neuron, after the call; until backward, `traces` for those of `pending`.
        in_place: whether backward overwrites `traces`.
        pending: the neurons whose traces backward has yet to update.
        matrix: that learns in place of the weight of the last linear layer, if any.
        cuts: in the order of the call; backward drops them.
        roots: the outputs of the network with their pieces of the graph.
        hidden: inputs of the network and outputs of neurons, without a graph, by id.
        inputs: the inputs of the network, by the id of the same without a graph.
        parameters: all that the pieces of the graph reach otherwise.
        layers: finds the sources of traces in a `with` block; None for a whole sequence.
    """

    cuts_graph = True

    def __init__(
        self,
        net: nn.Module,
        rule: str,
        traces: dict[str, list[Trace]] | None,
        matrix: Tensor | None = None,
        in_place: bool = False,
    ) -> None:
        self.net, self.rule, self.traces, self.matrix = net, rule, traces, matrix
        self.in_place, self.pending = in_place, set[str]()
        self.traces_after: dict[str, list[Trace]] = {}
        self.cuts: list[Cut] = []
        self.roots: list[Tensor] = []
        self.hidden: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        self.parameters: list[Tensor] = []
        self.layers = None if traces is None else Layers(net)

    def leaf(self, x: Tensor) -> Tensor:
        """Return an input of the network without its graph if that is cut."""
        if not x.requires_grad or self.rule == "sltt":
            return x
        found = self._hide(x)
        self.inputs[id(found)] = x
        return found

    def _hide(self, x: Tensor) -> Tensor:
        found = x.detach().requires_grad_(x.requires_grad)
        self.hidden[id(found)] = found
        return found

    def scan(
        self, neuron: nn.Module, scan: Scan, arguments: Arguments[Tensor], wanted: Wanted
    ) -> Results[Tensor]:
        """Run a scan with the derivatives of the rule.

        Raises:
            ValueError: an observer around this one would hand out what is cut.
        """
        assert isinstance(neuron, Neuron)
        outer = self.outer
        while outer is not None and self.rule != "sltt":
            if outer.keeps_graph:
                raise ValueError(
                    f"spikefuse.record with grad=True would lose gradients by rule '{self.rule}', "
                    "which cuts the graph at each neuron: use rule='bptt' or 'sltt', or let the "
                    "network return what the loss needs"
                )
            outer = outer.outer
        return super().scan(neuron, partial(self._scan, neuron, scan), arguments, wanted)

    def _scan(
        self, neuron: Neuron, scan: Scan, arguments: Arguments[Tensor], wanted: Wanted
    ) -> Results[Tensor]:
        _refuse_spikes(neuron, self.rule, arguments.inputs)
        layer, end = getattr(scan, "__self__", None), None
        sources: list[Source] = []
        if self.layers is not None:
            for i, x in enumerate(arguments.inputs):
                sources += self.layers.sources(i, x)
        if isinstance(layer, Recurrent | Feedback):
            arguments, end, last = self._received(layer, arguments, wanted)
            if self.layers is not None and isinstance(layer, Recurrent):
                x = arguments.inputs[0]
                matrix = torch.block_diag(*layer.effective_weight((x,)))
                sources.append(Source(0, last, matrix))
                if layer.bias is not None:
                    sources.append(constant(0, x, layer.bias))
        elif getattr(scan, "func", None) is not scan_neuron:
            raise ValueError(
                f"{type(neuron).__name__} is part of a Block, whose batch norm would be part of "
                "the derivatives: use a batch norm and a neuron as layers of their own"
            )
        definition = online_neuron(neuron, self.rule, wanted.outputs)
        arguments, wanted = from_rest(neuron, arguments), wanted._replace(outputs=())
        if self.rule == "sltt":
            results = scan_neuron(definition, arguments, wanted)
        else:
            results = self._cut(definition, arguments, wanted, sources)
        if end is not None and wanted.final:
            results = results._replace(finals=[*results.finals, end])
        return results

    def _received(
        self, layer: Recurrent | Feedback, arguments: Arguments[Tensor], wanted: Wanted
    ) -> tuple[Arguments[Tensor], Tensor, Tensor]:
        """What the neurons of a layer with feedback receive, with the gradients of its weights, and
        what is fed back after the last step and at each step."""
        (x, *others), states = arguments.inputs, arguments.states
        definition = online_neuron(layer.neuron, "sltt")
        with torch.no_grad():
            names = Wanted(True, outputs=(FIRST_OUTPUT, INPUT), impl=wanted.impl)
            (spikes, received), (*_, end), *_ = layer.scan(arguments, names, definition)
            start = torch.zeros_like(x[:1]) if states is None else states[-1].to(x.dtype)[None]
            last = torch.cat([start, spikes[:-1]])
        fed = unflatten_steps(layer.receive(flatten_steps(x), flatten_steps(last)), len(x))
        # Rounded as in the scan of the layer, so that the neurons spike as they did.
        inputs = [with_gradient_of(received, fed), *others]
        return arguments._replace(inputs=inputs, states=states and states[:-1]), end, last

    def _cut(
        self,
        definition: OnlineNeuron,
        arguments: Arguments[Tensor],
        wanted: Wanted,
        sources: list[Source],
    ) -> Results[Tensor]:
        inputs, states = [*arguments.inputs], arguments.states or ()
        name = "" if active.call is None else active.call.names.get(id(definition.neuron), "")
        flow: list[StateFlow] = []
        if self.layers is not None:
            definition, inputs, sources = _with_parameters(definition, inputs, sources)
            self._check(name, inputs, states, sources)
            flow = _flow(definition)
            if not all(state.is_uniform for state in flow):
                sources = [source.by_synapse() for source in sources]
        received, num = [*inputs, *states], len(inputs)
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in received]
        if self.layers is not None:
            for s in leaves[num:]:
                s.requires_grad_()
        # Only the layers below receive the gradient of the same time step.
        below = [bool(self._split(_leaves_of([x]))[1]) for x in inputs]
        twins = [x.detach().requires_grad_(y) for x, y in zip(inputs, below, strict=True)]
        first = tuple(leaves[num:]) or None
        results = scan_neuron(definition, Arguments([*leaves[:num], *twins], first), wanted)
        traces = self._traces_before(name, len(sources))
        pairs = [*zip(sources, traces, strict=True)]
        update: tuple[Any, ...] | None = None
        if self.layers is not None and wanted.final:
            update = name, pairs, results.finals, leaves, flow
            if self.in_place and any(traces):
                self.traces_after[name] = traces
                self.pending.add(name)
            else:
                self._update(False, *update)
                update = None
        outputs = [*map(self._hide, results.outputs)]
        cut = Cut(
            received, leaves, twins, [*results.outputs], outputs, pairs, _versions(pairs), update
        )
        self.cuts.append(cut)
        return results._replace(outputs=outputs)

    def _update(
        self,
        in_place: bool,
        name: str,
        sources: list[tuple[Source, Trace]],
        finals: Sequence[Tensor],
        leaves: list[Tensor],
        flow: list[StateFlow],
    ) -> None:
        """Compute the traces of a neuron after the call."""
        derivatives = differentiate(finals, leaves)
        with torch.no_grad(), torch.autocast(leaves[0].device.type, enabled=False):
            found = [s.updated(trace, derivatives, flow, in_place) for s, trace in sources]
        self.traces_after[name] = found
        self.pending.discard(name)

    def _traces_before(self, name: str, number: int) -> list[Trace]:
        """The traces of the sources of a neuron, which are empty at rest."""
        found = (self.traces or {}).get(name)
        if found is not None and len(found) != number:
            raise ValueError(
                f"state has traces for {len(found)} parameters of neuron '{name}', which now learns"
                f" {number}: start from state=None after parameters are frozen or learn again"
            )
        return [[] for _ in range(number)] if found is None else found

    def _check(
        self, name: str, inputs: list[Tensor], states: Sequence[Tensor], sources: list[Source]
    ) -> None:
        """Raise a ValueError for parameters that reach a neuron past the sources."""
        known = {id(x) for s in sources if s.matrix is not None for x in _leaves_of([s.matrix])}
        known |= {id(p) for s in sources if s.convolution for p in s.convolution.parameters()}
        parameters, _ = self._split(_leaves_of(states))
        if parameters:
            raise ValueError(
                f"the first states of neuron '{name}' are learned "
                f"({self._names(parameters) or 'by the code'}), for which rule '{self.rule}' has "
                "no traces in parts of a sequence: set requires_grad to False, pass the whole "
                "sequence without state= and return_state=True, or use rule='sltt'"
            )
        parameters, _ = self._split(_leaves_of(inputs))
        unknown = {id(p) for p in parameters} - known
        if self.matrix is not None and id(self.matrix) in unknown:
            raise ValueError(
                f"neuron '{name}' is behind the last nn.Linear, whose matrix of "
                "feedback='adaptive' has no traces in parts of a sequence: use feedback='random', "
                "or pass the whole sequence without state= and return_state=True"
            )
        if unknown:
            names = self._names([p for p in parameters if id(p) in unknown])
            raise ValueError(
                f"the parameters {names or 'of the code'} reach neuron '{name}' through other "
                "layers than one nn.Linear, nn.Conv1d, nn.Conv2d or nn.Conv3d directly before it "
                "(a transposed convolution is another layer), or through a hook or function that "
                f"may change gradients, for which rule '{self.rule}' has no traces in parts of a "
                "sequence: pass the whole sequence without state= and return_state=True, or use "
                "rule='sltt'"
            )

    def _names(self, parameters: Sequence[Tensor]) -> str:
        ids = set(map(id, parameters))
        return ", ".join(name for name, p in self.net.named_parameters() if id(p) in ids)

    def joined(self, values: list[Any]) -> list[Any]:
        """Return the outputs of the network with one node of a graph in place of the pieces."""
        self.roots = [y for y in values if isinstance(y, Tensor) and y.requires_grad]
        if not (self.cuts and self.roots):  # no backward pass will follow
            for cut in self.cuts:
                if cut.update is not None:
                    self._update(True, *cut.update)
            return values
        pieces = [*self.roots, *(x for cut in self.cuts for x in (*cut.results, *cut.received))]
        self.parameters, _ = self._split(_leaves_of(pieces))
        outputs = iter(_Join.apply(self, *self.parameters, *self.inputs.values()))
        is_root = [any(y is root for root in self.roots) for y in values]
        return [next(outputs) if known else y for known, y in zip(is_root, values, strict=True)]

    def _split(self, tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters, and inputs of the network and outputs of neurons."""
        found: tuple[list[Tensor], list[Tensor]] = [], []
        for x in tensors:
            found[id(x) in self.hidden].append(x)
        return found

    def backward(self, grads: MaybeTensors) -> MaybeTensors:
        """The gradients of the parameters and of the inputs, given those of `roots`."""
        with without_hooks(self.parameters):  # which are called for the sums that this returns
            totals = self._totals(grads)
        inputs = [self.hidden[i] for i in self.inputs]
        self.hidden.clear()
        return totals.pop([*self.parameters, *inputs])

    def _totals(self, grads: MaybeTensors) -> _Totals:
        """Add up the gradients of all pieces, the last one first."""
        totals = _Totals()
        totals.add(self.roots, grads, _leaves_of(self.roots))
        self.roots = []
        while self.cuts:
            cut = self.cuts.pop()
            totals.add(cut.results, totals.pop(cut.outputs), _leaves_of(cut.results))
            through, instant = totals.pop(cut.leaves), totals.pop(cut.twins)
            parameters, hidden = self._split(_leaves_of(cut.received))
            totals.add(cut.received, through, parameters)
            totals.add(cut.received[: len(instant)], instant, hidden)
            if _versions(cut.sources) != cut.versions:
                raise RuntimeError(
                    "the traces of the state that a call of Online has received were changed in "
                    "place before its backward pass: call backward() on its outputs first, before "
                    "another call with this state"
                )
            for source, trace in cut.sources:
                with torch.enable_grad():
                    functions, found = source.contributions(trace, through[len(instant) :])
                totals.add(functions, found, _leaves_of(functions))
            del through, instant  # before the update, which is as large
            if cut.update is not None:
                self._update(True, *cut.update)
        return totals


def _versions(sources: list[tuple[Source, Trace]]) -> list[int]:
    """How often the traces of sources were changed in place."""
    return [version(e) for _, trace in sources for e in trace if e is not None]


class _Totals:
    """Gradients of leaves, by their ids."""

    def __init__(self) -> None:
        self._found: dict[int, Tensor] = {}

    def add(self, roots: Sequence[Tensor], grads: MaybeTensors, to: list[Tensor]) -> None:
        """Add what gradients of `roots` are for the leaves `to`."""
        pairs = zip(roots, grads, strict=True)
        known = [(y, g) for y, g in pairs if g is not None and y.requires_grad]
        if not (known and to):
            return
        ys, gs = zip(*known, strict=True)
        # Another piece may read the same part of the graph, such as a weight that is computed.
        found = torch.autograd.grad(ys, to, gs, retain_graph=True, allow_unused=True)
        for x, g in zip(to, found, strict=True):
            if g is not None:
                before = self._found.get(id(x))
                self._found[id(x)] = g if before is None else before + g

    def pop(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """Return and drop gradients; None for those without one."""
        return [self._found.pop(id(x), None) for x in tensors]


class _Join(torch.autograd.Function):
    """The outputs of a network whose graph is in pieces."""

    @staticmethod
    def forward(ctx: Any, learning: Learning, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.learning = learning
        ctx.set_materialize_grads(False)
        return tuple(y.detach() for y in learning.roots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        learning, ctx.learning = ctx.learning, None
        if learning is None:
            raise RuntimeError("Online frees its graph in the first backward pass: call it again")
        return None, *learning.backward(grads)


def _refuse_spikes(neuron: Neuron, rule: str, inputs: Sequence[Tensor]) -> None:
    """Raise a ValueError for a neuron whose spikes, or whose reset, the rule would still follow."""
    cache, key = neuron.description().cache, ("online", rule, "is known")
    if key in cache or rule not in ("ottt", "e-prop"):
        return
    modules = [*neuron.modules()]
    has_surrogate = any(isinstance(module, Surrogate) for module in modules)
    kind = f"{type(neuron).__name__} spikes"
    if rule == "ottt" and not has_surrogate and _is_discrete(neuron, inputs):
        raise ValueError(
            f"{kind} without a surrogate of spikefuse.surrogate, which rule 'ottt' looks for to "
            "leave out what spikes change in the states: spike by one, such as Custom, or use "
            "rule='e-prop' or 'd-rtrl'"
        )
    can_detach = any(hasattr(module, "detach_reset") for module in modules)
    if rule == "e-prop" and not can_detach and (has_surrogate or _is_discrete(neuron, inputs)):
        raise ValueError(
            f"{kind} and has no attribute detach_reset, by which rule 'e-prop' leaves out the "
            "reset: give it one, True or False, that its step follows, or use rule='d-rtrl', which "
            "is the same without a reset"
        )
    cache[key] = True


def _is_discrete(neuron: Neuron, inputs: Sequence[Tensor]) -> bool:
    """Whether an output has only whole values, for inputs that have others."""
    like = inputs[0][:, :1]
    dtype = torch.promote_types(like.dtype, torch.float32)
    x = torch.linspace(4.1, -3.7, like.numel(), dtype=dtype, device=like.device).view(like.shape)
    with torch.no_grad():
        outputs, _ = reference.scan(neuron, (x,) * len(inputs))
    return any(y.numel() > 0 and bool((y == y.round()).all()) for y in outputs)


def _flow(definition: OnlineNeuron) -> list[StateFlow]:
    """How the new states of a definition depend on inputs and earlier states."""
    description = definition.description()
    kinds = kinds_of(description.values(definition))
    statics, cache = description.statics, description.cache
    return prepare(definition, "numba", statics, kinds, cache).state_flow  # of any backend


def _with_parameters(
    definition: OnlineNeuron, inputs: list[Tensor], sources: list[Source]
) -> tuple[OnlineNeuron, list[Tensor], list[Source]]:
    """Make the parameters of a neuron that are learned further inputs, whose gradients are those of
    each neuron."""
    neuron, x, found = definition.neuron, inputs[0], [*sources]
    values = neuron.description().values(neuron)
    firsts = [state.initial for state in neuron.states.values()]
    tensors = {n: p for n, p in values.items() if isinstance(p, Tensor) and n not in firsts}
    learned, inputs = {n: p for n, p in tensors.items() if p.requires_grad}, [*inputs]
    if not learned:
        return definition, inputs, sources
    for name, p in learned.items():
        value = channel_view(name, p, x.shape[1:])
        found.append(constant(len(inputs), x, value))
        inputs.append(value.to(x.dtype).expand(x.shape))
    neuron = with_inputs(neuron, values, tuple(learned))
    return online_neuron(neuron, definition.rule, definition.names), inputs, found


def _leaves_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The leaves of the graphs of tensors."""
    found = {id(x): x for x in tensors if x.grad_fn is None and x.requires_grad}
    pending = [x.grad_fn for x in tensors if x.grad_fn is not None]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        pending += [n for n, _ in node.next_functions if n is not None]
    return [*found.values()]
