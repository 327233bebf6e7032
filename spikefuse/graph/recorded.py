"""CUDA-graph replays of a captured network, forward and backward, in any loop."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import increment_version

from spikefuse._torch import keeps_graph, version
from spikefuse.graph import capture
from spikefuse.graph.capture import NotRecordable, Pool, static_copy, stored
from spikefuse.neurons.checks import is_dense
from spikefuse.scan.double_backward import refuse_double_backward

#: Eager calls before a recording, with the same shapes.
WARMUP = 3
#: Recordings of one function, for other shapes or modes.
MAX_RECORDINGS = 8
#: How often parameters may move, each time after few replays.
MAX_MOVES, FEW_REPLAYS = 4, 32


def recorded(function: Callable[..., Any], buffers: Container[int] = ()) -> Recorded:
    """Replay a captured network as CUDA graphs, one for forward and one for backward.

    The first calls run `function` as it is. Then a call, and its backward pass, take one launch
    each, for each set of shapes, modes and inputs that require gradients. Results and gradients
    are those of `function`, in memory of their own. Gradients of results are copied to dense
    memory, where cuBLAS may round otherwise than from expanded ones, such as those of `sum()`.

    - Parameters and buffers are read and changed where they are. If they have moved, the network is
      recorded again. Other inputs are copied.
    - The memory of a forward pass is in use until its backward pass, or until its results are
      dropped. A call in between runs `function`. So does a call inside another CUDA graph, a
      recorded step, or saved-tensor hooks, such as those of `torch.utils.checkpoint`.
    - Random numbers of PyTorch's generator on the GPU equal those of eager calls.
    - Gradients arrive at once at the end of the backward pass, so that DistributedDataParallel
      does not send some of them while others are computed.
    - Recordings of a process share memory where they are not in use at the same time.
    - Storages of parameters must last from forward to backward: `fully_shard` frees them.

    A function that cannot be recorded runs eagerly from then on, with a warning.

    Args:
        function: takes tensors, on one GPU, and numbers, in the order of the inputs of the graph
            that TorchDynamo has captured; returns a tuple of tensors.
        buffers: the positions of buffers among the inputs, see `buffers_of`.

    Returns:
        A function of the same arguments, to be called as TorchDynamo calls it. Its attribute
        `obstacle` says why it runs eagerly for good; empty if it does not.
    """
    return Recorded(function, buffers)


def buffers_of(gm: fx.GraphModule) -> set[int]:
    """Return which inputs of a graph are buffers. TorchDynamo names inputs by where they are."""
    inputs = gm.graph.find_nodes(op="placeholder")
    return {i for i, node in enumerate(inputs) if "_buffers_" in str(node.target)}


class Recorded:
    """The result of `recorded`.

    Attributes:
        num_replays, num_eager: what the calls so far have done.
        obstacle: why all further calls run eagerly; empty if they need not.
    """

    def __init__(self, function: Callable[..., Any], buffers: Container[int]) -> None:
        self.function, self.buffers = function, buffers
        self.num_replays = self.num_eager = self.num_moves = 0
        self.obstacle = ""
        self._inputs: _Inputs | None = None
        self._recordings: dict[Any, _Recording] = {}
        self._warm: dict[Any, int] = {}  # eager calls
        self._differentiated: set[Any] = set()
        self._is_full = False
        self._retains = False  # whether a backward pass had retain_graph=True

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self._inputs is None and not self.obstacle:
            self._inputs = _Inputs(inputs, self.buffers)
            self.obstacle = self._inputs.obstacle
        if self.obstacle or not _can_replay():
            return self._run(inputs)
        assert self._inputs is not None
        key = self._inputs.key(inputs)
        recording = self._recordings.get(key)
        if recording is None:
            if not self._is_warm(key):
                return self._warm_up(key, inputs)
            recording = self._record(key, inputs)
        elif recording.addresses != self._inputs.addresses(inputs):
            self.num_moves = self.num_moves + 1 if recording.num_replays < FEW_REPLAYS else 1
            recording = self._record(key, inputs)
        elif recording.pool.is_used_by_others(self):
            recording = self._record(key, inputs, _new_pool)
        result = None if recording is None else recording(self, inputs)
        if result is None:
            return self._run(inputs)
        self.num_replays += 1
        return result

    def _run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        self.num_eager += 1
        return tuple(self.function(*inputs))

    def _is_warm(self, key: Any) -> bool:
        """Kernels are compiled and tuned in eager calls, also those of backward."""
        return self._warm.get(key, 0) >= WARMUP and (not key[0] or key in self._differentiated)

    def _warm_up(self, key: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        outputs = self._run(inputs)
        if len(self._warm) < 16 * MAX_RECORDINGS:
            self._warm[key] = self._warm.get(key, 0) + 1
        if key[0] and key not in self._differentiated:
            mark = weakref.WeakMethod(self._mark)
            for x in outputs:
                if isinstance(x, Tensor) and x.grad_fn is not None:
                    x.register_hook(lambda _, key=key: (mark() or _ignore)(key))
        return outputs

    def _mark(self, key: Any) -> None:
        self._differentiated.add(key)
        self._retains |= keeps_graph()

    def _record(
        self, key: Any, inputs: Sequence[Any], pool: Callable[[], _SharedPool] | None = None
    ) -> _Recording | None:
        """Record a call; None if it has to run eagerly."""
        assert self._inputs is not None
        self._recordings.pop(key, None)
        if len(self._recordings) >= MAX_RECORDINGS:
            if not self._is_full:
                self._warn(
                    f"more than {MAX_RECORDINGS} shapes and modes, of which the others run eagerly"
                )
            self._is_full = True
            return None
        try:
            if self.num_moves > MAX_MOVES:
                raise NotRecordable("its parameters or buffers move again and again")
            with torch.cuda.device(self._inputs.device):
                memory = (pool or _free_pool)()
                recording = _Recording(
                    self.function, self._inputs, inputs, (key[0], self._retains), memory
                )
        except Exception as error:
            self.obstacle = capture.reason(error)
        if self.obstacle:
            self._recordings.clear()
            torch.cuda.empty_cache()
            self._warn(self.obstacle)
            return None
        self._recordings[key] = recording
        return recording

    def _warn(self, reason: str) -> None:
        warnings.warn(f"a network is not recorded as a CUDA graph: {reason}", stacklevel=4)


def _ignore(_: Any) -> None:
    pass


def _can_replay() -> bool:
    """Whether a call may replay: nothing around it needs the operations one by one."""
    if capture.is_in_recorded_step() or torch.cuda.is_current_stream_capturing():
        return False
    try:  # hooks on saved tensors cannot be disabled while there are some
        with torch.autograd.graph.disable_saved_tensors_hooks(
            "a recorded network saves no tensors"
        ):
            return True
    except RuntimeError:
        return not torch.is_grad_enabled()


class _Inputs:
    """Which inputs of a function are where.

    Attributes:
        static: positions of parameters and buffers.
        copied: positions of the other tensors.
        obstacle: why the inputs cannot be recorded.
    """

    def __init__(self, inputs: Sequence[Any], buffers: Container[int]) -> None:
        tensors = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
        # A copy of a buffer must not be changed in its place.
        self.static = [i for i in tensors if i in buffers or isinstance(inputs[i], nn.Parameter)]
        self.copied = [i for i in tensors if i not in set(self.static)]
        self.others = [i for i, x in enumerate(inputs) if not isinstance(x, Tensor)]
        self.tensors, self.obstacle = tensors, ""
        devices = {x.device for x in map(inputs.__getitem__, tensors)}
        kinds = {type(x) for x in map(inputs.__getitem__, tensors)} - {Tensor, nn.Parameter}
        if len(devices) != 1 or not capture.is_cuda(inputs[tensors[0]]):
            names = " and ".join(sorted(map(str, devices))) or "none"
            self.obstacle = f"its inputs are not on one GPU, but on: {names}"
        elif kinds:
            self.obstacle = f"an input is a {kinds.pop().__name__}"
        elif not all(is_dense(inputs[i]) for i in tensors):
            self.obstacle = "an input is sparse or nested"
        elif any(inputs[i].is_inference() for i in self.static):
            self.obstacle = "its parameters or buffers were made in inference mode"
        self.device: torch.device = inputs[tensors[0]].device if tensors else torch.device("cpu")

    def key(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return what a recording depends on, gradients first. TorchDynamo guards the rest."""
        required = None
        if torch.is_grad_enabled():
            required = tuple([inputs[i].requires_grad for i in self.tensors])
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        shapes = [(x.shape, x.stride(), x.dtype) for x in [inputs[i] for i in self.copied]]
        others = [inputs[i] for i in self.others]
        return required is not None and any(required), required, autocast, *shapes, *others

    def addresses(self, inputs: Sequence[Any]) -> list[int]:
        return [inputs[i].data_ptr() for i in self.static]


class _SharedPool(Pool):
    """Memory that recordings share. One of them uses it at a time: from a forward replay to the
    backward replay, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.owner: Callable[[], Recorded | None] = _none  # of the last replay with gradients
        self.forward: Callable[[], Any] = _none  # its autograd context
        self.last: torch.cuda.Stream | None = None

    def is_live(self) -> bool:
        """Whether a backward pass may still read what the last forward replay has saved."""
        ctx = self.forward()
        if ctx is None:
            return False
        try:
            ctx.saved_tensors  # noqa: B018
        except RuntimeError:  # it was differentiated, or parameters have changed since
            return False
        return True

    def is_used_by_others(self, user: Recorded) -> bool:
        return self.owner() is not user and self.is_live()

    @contextlib.contextmanager
    def ordered(self, device: torch.device) -> Iterator[None]:
        """Let replays on several streams follow one another."""
        stream = torch.cuda.current_stream(device)
        if self.last is not None and stream != self.last:
            stream.wait_stream(self.last)
        self.last = stream
        yield


def _none() -> None:
    return None


_pools: weakref.WeakSet[_SharedPool] = weakref.WeakSet()


def _free_pool() -> _SharedPool:
    """Return memory that no forward pass uses, on the current GPU."""
    device = torch.cuda.current_device()
    for pool in list(_pools):
        if pool.stream.device_index == device and pool.is_usable and not pool.is_live():
            return pool
    return _new_pool()


def _new_pool() -> _SharedPool:
    pool = _SharedPool()
    _pools.add(pool)
    return pool


class _Recording:
    """CUDA graphs of a function for inputs of certain shapes.

    Attributes:
        addresses: of its static inputs.
        read: positions of the inputs that backward may read, and that must not change before it.
        retains: whether backward may run twice, as in the calls before the recording. Otherwise its
            results lie where forward has saved tensors.
        changed: positions of the inputs that forward changes.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        positions: _Inputs,
        inputs: Sequence[Any],
        needs: tuple[bool, bool],
        pool: _SharedPool,
    ) -> None:
        self.pool, self.positions, self.num_replays = pool, positions, 0
        grads, self.retains = needs
        self.addresses = positions.addresses(inputs)
        with torch.inference_mode(False), torch.set_grad_enabled(grads):
            leaves = list(inputs)
            for i in positions.static:
                # An alias has neither the hooks of the parameter nor its place in autograd.
                leaves[i] = inputs[i].detach().requires_grad_(grads and inputs[i].requires_grad)
            for i in positions.copied:
                with torch.no_grad():
                    leaves[i] = static_copy(inputs[i].detach())
                leaves[i].requires_grad_(grads and inputs[i].requires_grad)
            self.inputs = [stored(leaves[i].detach()) for i in positions.copied]
            tensors = {i: leaves[i] for i in positions.tensors}
            versions = {i: version(x) for i, x in tensors.items()}
            self.graph, outputs = capture.capture(lambda: function(*leaves), self.pool)
            self.changed = [i for i, x in tensors.items() if version(x) != versions[i]]
            if not set(self.changed) <= set(positions.static):
                raise NotRecordable("it changes an input in place")
            self.read = [i for i in positions.static if i not in set(self.changed)]
            self._set_outputs(outputs, positions.device)
            self.wanted = [i for i, x in tensors.items() if x.requires_grad]
            self.is_differentiable = any(self.differentiable)
            if self.is_differentiable:
                self._record_backward(outputs, [leaves[i] for i in self.wanted])

    def _set_outputs(self, outputs: Sequence[Any], device: torch.device) -> None:
        tensors = [x for x in outputs if isinstance(x, Tensor)]
        for x in tensors:
            if type(x) not in (Tensor, nn.Parameter) or not is_dense(x):
                raise NotRecordable(f"an output is a {type(x).__name__} of layout {x.layout}")
            if x.device != device:
                raise NotRecordable(f"an output is on {x.device}")
        self.template = [None if isinstance(x, Tensor) else x for x in outputs]
        self.places = [i for i, x in enumerate(outputs) if isinstance(x, Tensor)]
        self.outputs = [x.detach() for x in tensors]  # without what autograd has saved
        self.differentiable = [x.requires_grad for x in tensors]

    def _record_backward(self, outputs: Sequence[Any], leaves: list[Tensor]) -> None:
        results = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
        self.grad_outputs = [torch.empty_like(x) for x in results]

        def run() -> list[Tensor | None]:
            with torch.autocast("cuda", enabled=False):
                grads = torch.autograd.grad(
                    results,
                    leaves,
                    self.grad_outputs,
                    retain_graph=self.retains,
                    allow_unused=True,
                )
            return [None if g is None else _dense(g) for g in grads]

        self.backward_graph, grads = capture.capture(run, self.pool)
        self.grads = _Copies(grads)
        self.reached = [_reached(x, leaves) for x in results]

    def __call__(self, owner: Recorded, inputs: Sequence[Any]) -> tuple[Any, ...] | None:
        """Replay forward; None if the memory is in use."""
        with self.pool.lock:
            if self.pool.is_live():
                return None
            if self.is_differentiable:
                results = _Replay.apply(self, inputs, *[inputs[i] for i in self.wanted])
                self.pool.owner = weakref.ref(owner)
            else:
                results = self.forward(inputs)
        outputs = list(self.template)
        for i, x in zip(self.places, results, strict=True):
            outputs[i] = x
        return tuple(outputs)

    def forward(self, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        with torch.no_grad(), self.pool.ordered(self.positions.device):
            for x, i in zip(self.inputs, self.positions.copied, strict=True):
                x.copy_(stored(inputs[i]))
            self.graph.replay()
            self.num_replays += 1
            if self.changed:
                increment_version([inputs[i] for i in self.changed])
            return tuple([x.clone() for x in self.outputs])

    def backward(self, ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        pool, has = self.pool, [g is not None for g in grads]
        if not any(has):
            return [None] * len(self.wanted)
        with torch.no_grad(), pool.lock, pool.ordered(self.positions.device):
            if pool.forward() is not ctx:
                raise RuntimeError(
                    "a recorded network cannot go back through this forward pass: a later one has "
                    "taken its memory"
                )
            if ctx.is_spent and not self.retains:
                raise RuntimeError(
                    "a recorded network cannot run backward twice after calls in which it did so "
                    "once: use retain_graph=True from the first call on, or spikefuse.fuse(net, "
                    'mode="eager")'
                )
            ctx.is_spent = True
            for x, g in zip(self.grad_outputs, grads, strict=True):
                if g is None:
                    x.zero_()
                else:
                    x.copy_(g)
            self.backward_graph.replay()
            found = self.grads.make()
        if not all(has):
            reached = set().union(*compress(self.reached, has))
            found = [g if i in reached else None for i, g in enumerate(found)]
        return found


class _Replay(torch.autograd.Function):
    """A forward replay; its inputs are those that require gradients."""

    @staticmethod
    def forward(
        ctx: Any, recording: _Recording, inputs: Sequence[Any], *_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.recording, ctx.is_spent = recording, False
        ctx.set_materialize_grads(False)
        # Raises PyTorch's own errors: a parameter has changed, or the graph was freed.
        ctx.save_for_backward(*[inputs[i] for i in recording.read])
        results = recording.forward(inputs)
        is_differentiable = recording.differentiable
        ctx.mark_non_differentiable(
            *[x for x, d in zip(results, is_differentiable, strict=True) if not d]
        )
        recording.pool.forward = weakref.ref(ctx)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        recording, read = ctx.recording, ctx.saved_tensors
        grads = tuple(compress(grads, recording.differentiable))
        found = recording.backward(ctx, grads)
        return None, None, *refuse_double_backward(found, *grads, *read)


class _Copies:
    """Copies of tensors in new memory, by one launch for each dtype."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self.num = len(tensors)
        self.memory: dict[torch.dtype, list[Tensor]] = {}
        self.places: dict[torch.dtype, list[tuple[int, Any]]] = {}
        offsets: dict[torch.dtype, int] = {}
        for i, x in enumerate(tensors):
            if x is None:
                continue
            memory = self.memory.setdefault(x.dtype, [])
            offset, size = offsets.get(x.dtype, 0), x.numel()
            self.places.setdefault(x.dtype, []).append((i, (x.shape, x.stride(), offset)))
            memory.append(x.as_strided((size,), (1,)))
            padding = -size % _ALIGNMENT
            if padding:
                memory.append(x.new_zeros(padding))
            offsets[x.dtype] = offset + size + padding

    def make(self) -> list[Tensor | None]:
        copies: list[Tensor | None] = [None] * self.num
        for dtype, memory in self.memory.items():
            flat = torch.cat(memory)
            for i, place in self.places[dtype]:
                copies[i] = flat.as_strided(*place)
        return copies


_ALIGNMENT = 64  # elements


def _dense(x: Tensor) -> Tensor:
    if x.layout is not torch.strided:
        raise NotRecordable(f"a gradient has the layout {x.layout}")
    return x if torch.empty_like(x).stride() == x.stride() else x.contiguous()


def _reached(output: Tensor, leaves: list[Tensor]) -> set[int]:
    """Return which leaves get a gradient from an output."""
    positions = {id(x): i for i, x in enumerate(leaves)}
    seen, left = set[Any](), [output.grad_fn]
    found = {positions[id(output)]} if id(output) in positions else set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in positions:
            found.add(positions[id(leaf)])
        left += [n for n, _ in node.next_functions]
    return found
