"""Eligibility traces: how the states of neurons depend on parameters through all earlier steps.

Parameters m that add `m a[t]` to an input x of neurons with the states v have the trace
`e[t] = dv[t]/dm`, which follows `e[t] = J e[t - 1] + dv[t]/dx[t] a[t]` with `J = dv[t]/dv[t - 1]`.
Its product with the gradient of the states before some steps is the gradient of m through all
earlier steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import isfunction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.utils import skip_init

from spikefuse._torch import backward_hooks, version
from spikefuse.scan.program import StateFlow

#: For each state `[R, N, I]`, or `[R, 1, I]` where it is the same for all N neurons; None for 0.
Trace = list[Tensor | None]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def differentiate(ends: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[list[Tensor | None]]:
    """Differentiate each last state by each leaf, inputs and states `[B, ...]`, on which neurons
    depend one by one."""
    found: list[list[Tensor | None]] = []
    to = [x for x in leaves if x.requires_grad]
    alive = [end for end in ends if to and end.requires_grad]
    for end in ends:
        grads: dict[int, Tensor | None] = {}
        if any(end is other for other in alive):
            # With zeros for the others, one kernel computes the derivatives of each of them.
            seeds = [torch.full_like(other, other is end) for other in alive]
            each = torch.autograd.grad(alive, to, seeds, retain_graph=True, allow_unused=True)
            grads = dict(zip(map(id, to), each, strict=True))
        found.append([grads.get(id(x)) for x in leaves])
    return found


class Source(NamedTuple):
    """Parameters that reach an input of neurons, and what they are multiplied by.

    Attributes:
        place: of the input among all.
        values: `[T, R, I]`, where the R rows are samples, or samples and positions.
        matrix: `[N, I]`, with the graph of the parameters; None for a convolution.
        convolution: of the values of one step; its bias is another source.
        groups, positions: of the rows of a sample, where neurons are channels first, and the rows
            of the matrix are those of all groups.
    """

    place: int
    values: Tensor
    matrix: Tensor | None
    convolution: Any = None
    groups: int = 1
    positions: int = 1

    def by_synapse(self) -> Source:
        """The source with one value for each synapse, so that of a convolution reads patches."""
        layer = self.convolution
        if layer is None:
            return self
        base = next(kind for kind in CONVOLUTIONS if isinstance(layer, kind))
        matrix, x, groups = layer.weight.flatten(1), self.values, layer.groups
        shape = layer.in_channels, groups * matrix.shape[1], layer.kernel_size
        moves = layer.stride, layer.padding, layer.dilation, groups, False, layer.padding_mode
        patches = skip_init(base, *shape, *moves, device=x.device, dtype=x.dtype)
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            unit = torch.eye(matrix.shape[1], dtype=x.dtype, device=x.device)
            patches.weight.copy_(unit.repeat(groups, 1).view_as(patches.weight))
            y = patches(x.flatten(0, 1)).flatten(2).unflatten(1, (groups, -1))
        values = y.mT.unflatten(0, (len(x), -1)).flatten(1, 3)
        return Source(self.place, values, matrix, None, groups, y.shape[-1])

    def updated(
        self,
        trace: Trace,
        derivatives: list[list[Tensor | None]],
        flow: Sequence[StateFlow],
        in_place: bool,
    ) -> Trace:
        """Return the trace after some steps, given that before, which is empty at rest.

        Args:
            derivatives: from `differentiate`, by inputs and then states.
            in_place: whether to overwrite `trace` where no other state needs its tensors.
        """
        found: Trace = []
        for k, (inputs, states, is_uniform) in enumerate(flow):
            total: Tensor | None = None
            for i in states if trace else ():
                before, by_state = trace[i], derivatives[k][i - len(flow)]
                if before is not None and by_state is not None:
                    rows = self._by_neuron(by_state, 1, is_uniform)[0, ..., None]
                    # In place, since a trace may be the largest tensor.
                    if total is not None:
                        total.addcmul_(rows, before)
                        continue
                    is_last = in_place and all(i not in later.states for later in flow[k + 1 :])
                    fits = rows.shape[1] in (1, before.shape[1]) and rows.dtype == before.dtype
                    total = torch.mul(rows, before, out=before if is_last and fits else None)
            by_input = derivatives[k][self.place]
            if by_input is not None and self.place in inputs:
                rows = self._by_neuron(by_input, len(self.values), is_uniform).permute(1, 2, 0)
                values = self.values.flatten(2).transpose(0, 1).to(rows.dtype)
                total = rows @ values if total is None else total.baddbmm_(rows, values)
            found.append(total)
        return found

    def _by_neuron(self, x: Tensor, num_steps: int, is_uniform: bool) -> Tensor:
        """`[T, R, N]`, or `[T, R, 1]` for derivatives that are the same for all neurons."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        rows = self.values.shape[1]
        x = x.reshape(num_steps, rows // self.positions, -1, self.positions).to(dtype)
        x = x.mT.reshape(num_steps, rows, -1)
        return x[..., :1] if is_uniform else x

    def contributions(
        self, trace: Trace, grads: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return functions of the parameters and their gradients, given those of the states before
        some steps."""
        functions, found = [], []
        for e, grad in zip(trace, grads, strict=False):  # a trace is empty at rest
            if e is None or grad is None:
                continue
            if self.matrix is None:
                assert self.convolution is not None
                step = e.view(self.values.shape[1:]).to(self.convolution.weight.dtype)
                # The gradients of the bias add up to 0.
                y = self.convolution(step) - self.convolution(torch.zeros_like(step))
                total = grad.reshape(y.shape)
            else:
                y, rows = self.matrix, self._by_neuron(grad, 1, False)[0]
                rows, e = (t.unflatten(0, (-1, self.groups, self.positions)) for t in (rows, e))
                is_uniform = e.shape[3] == 1
                equation = "bgpn,bgpi->gni" if is_uniform else "bgpn,bgpni->gni"
                total = torch.einsum(equation, rows, e.squeeze(3) if is_uniform else e)
                total = total.flatten(0, 1)
            functions.append(y)
            found.append(total.to(y.dtype))
        return functions, found


def constant(place: int, x: Tensor, value: Tensor) -> Source:
    """The source of a parameter that each step of an input `x` `[T, B, ...]` contains.

    Args:
        value: broadcasts to `[...]`.
    """
    ones = x.new_ones(()).expand(*x.shape[:2], 1)
    return Source(place, ones, value.expand(x.shape[2:]).reshape(-1, 1))


class Layers:
    """Finds the sources of what neurons receive, in a `with` block around a call of a network.

    Attributes:
        calls: the calls of linear layers and convolutions: output and its version, layer, input.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.calls: list[tuple[Tensor, int, nn.Module, Tensor]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for module in self.net.modules():
            if _is_source(module):
                # Before hooks that change the output, which is then not that of the layer.
                handle = module.register_forward_hook(self._add, prepend=True)
                self._handles.append(handle)

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self.calls.clear()

    def _add(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.calls.append((output, version(output), module, args[0].detach()))

    def sources(self, place: int, x: Tensor) -> list[Source]:
        """The sources of an input `[T, B, ...]` that is what one of the layers returned; empty for
        other inputs."""
        for output, known, module, values in self.calls:
            is_same = x.data_ptr() == output.data_ptr() and x.numel() == output.numel()
            if not is_same or version(x) != known or _may_change_gradients(x, output):
                continue  # changed in place, or on the way back
            y = output.unflatten(0, (len(x), -1))
            in_order = x.is_contiguous() and y.is_contiguous()
            if in_order or (x.shape, x.stride()) == (y.shape, y.stride()):
                return _sources(place, y, module, values.unflatten(0, (len(x), -1)))
        return []


def _may_change_gradients(x: Tensor, output: Tensor) -> bool:
    """Whether something between `output` and `x`, a view of it, may change the gradient."""
    node = x.grad_fn
    while node is not None and node is not output.grad_fn:
        # An autograd.Function, or a backward hook of a module.
        if isinstance(node, FunctionCtx) and not hasattr(node, "keeps_gradient"):
            return True
        node = node.next_functions[0][0]
    return bool(backward_hooks(output))


def _is_source(module: nn.Module) -> bool:
    """Whether a module computes what PyTorch's linear layer or convolution does."""
    kind = type(module)
    if kind.forward is nn.Linear.forward:
        return True
    for base in CONVOLUTIONS:
        if isinstance(module, base):
            own = {n: f for n, f in vars(base).items() if isfunction(f) and not n.startswith("__")}
            return all(getattr(kind, name) is f for name, f in own.items())
    return False


def _sources(place: int, x: Tensor, module: Any, values: Tensor) -> list[Source]:
    if isinstance(module, nn.Linear):
        found = [Source(place, values.flatten(1, -2), module.weight)]
        if module.bias is not None:
            found.append(constant(place, x.flatten(1, -2), module.bias))
        return found
    found = [Source(place, values, None, module)]
    if module.bias is not None:
        found.append(constant(place, x, module.bias.view(-1, *[1] * (x.ndim - 3))))
    return found
