"""A stand-in for CUDA graphs on a CPU: a tape of PyTorch's operations on fixed memory.

As with CUDA graphs, a capture changes nothing, and a replay runs the same operations on the same
memory. Only operations of PyTorch's dispatcher are recorded.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spikefuse.graph import capture


class Stream:
    device_index = 0

    def wait_stream(self, other: Stream) -> None:
        pass


class Graph:
    """One capture at a time, as on a GPU."""

    active: Graph | None = None

    def __init__(self) -> None:
        self.tape: list[tuple[Any, ...]] = []
        self.num_replays = 0

    def capture_begin(self, *args: Any, **options: Any) -> None:
        assert Graph.active is None
        Graph.active = self
        self.before: list[tuple[Tensor, Tensor]] = []
        self.made: list[Tensor] = []
        self.mode = _Recorder(self)
        self.mode.__enter__()

    def capture_end(self) -> None:
        if Graph.active is not self:
            raise RuntimeError("capture_end() called before capture_begin().")
        Graph.active = None
        self.mode.__exit__(None, None, None)
        del self.mode
        for x, value in reversed(self.before):
            _write(x, value)
        for x in self.made:
            if x.is_floating_point():
                _write(x, torch.full_like(x, torch.nan))  # nothing has run

    def replay(self) -> None:
        self.num_replays += 1
        with torch.no_grad():
            for func, args, kwargs, outputs in self.tape:
                results = pytree.tree_leaves(func(*args, **kwargs))
                for x, new in zip(outputs, results, strict=True):
                    if x is not None:
                        _write(x, new)


def _write(x: Tensor, value: Tensor) -> None:
    x.data.copy_(value)  # without a new version


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        given = {a.name: x for a, x in zip(arguments, args, strict=False)} | kwargs
        for a in arguments:
            written = given.get(a.name) if a.alias_info and a.alias_info.is_write else None
            for x in pytree.tree_leaves(written):
                if isinstance(x, Tensor):
                    self.graph.before.append((x, x.detach().clone()))
        if func is torch.ops.aten.native_batch_norm.default:  # changes statistics, undeclared
            self.graph.before += [(x, x.clone()) for x in args[3:5] if x is not None and args[5]]
        out = func(*args, **kwargs)
        owned = {_memory(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        leaves = pytree.tree_leaves(out)
        new = [
            x.detach() if isinstance(x, Tensor) and _memory(x) not in owned else None
            for x in leaves
        ]
        self.graph.made += [x for x in new if x is not None and x.layout is torch.strided]
        flat, spec = pytree.tree_flatten((args, kwargs))
        flat = [x.detach() if isinstance(x, Tensor) else x for x in flat]
        args, kwargs = pytree.tree_unflatten(flat, spec)
        self.graph.tape.append((func, args, kwargs, new))
        return out


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else id(x)


def install(monkeypatch: Any) -> None:
    """Let the CPU pass for a GPU."""
    for name, value in {
        **dict.fromkeys(("Stream", "current_stream"), lambda *_: STREAM),
        **dict.fromkeys(("stream", "device"), lambda _: contextlib.nullcontext()),
        **dict.fromkeys(("synchronize", "empty_cache"), lambda: None),
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": Graph,
        "current_device": lambda: 0,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
        "is_current_stream_capturing": lambda: Graph.active is not None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(capture, "is_cuda", lambda x: True)
    # "cuda" would be refused without one.
    monkeypatch.setattr(capture, "_abandon", abandon)


def abandon(graph: Graph, pool: capture.Pool) -> None:
    with contextlib.suppress(RuntimeError):
        graph.capture_end()


STREAM = Stream()
