"""Run a network by the graphs that TorchDynamo captures of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import count, islice
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from spikefuse._torch import has_global_hooks, hooks_of, whole_graphs
from spikefuse.graph.backend import Graph, compile_graph
from spikefuse.graph.report import GraphReport
from spikefuse.memory.policies import Checkpoint
from spikefuse.nn.call import active, current_policy
from spikefuse.nn.checkpoint import checkpoint
from spikefuse.scan.checks import are_transformed

MODES = ("auto", "eager", "inductor", "recorded")

#: How often the graphs of a function are dropped to capture others: TorchDynamo stores only a few.
MAX_RENEWALS = 4
#: How many functions and sets of hooks are captured; with further hooks, the network runs unfused.
MAX_CAPTURED = 16

_numbers = count()

# Where a network raises an error, capturing it fails first, and PyTorch would log that traceback.
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda _: not active.captures)


class Captured:
    """Runs functions of one network as fused graphs; see `spikefuse.fuse`.

    A copy, also by `copy.deepcopy` or pickle, captures its own network anew.

    Attributes:
        mode: how graphs run.
        report: what was done in the graphs that were captured last.
    """

    def __init__(self, mode: str = "auto", prefix: str = "") -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}: expected one of {', '.join(MODES)}")
        self.mode, self.report = mode, GraphReport(prefix)
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._renewals = 0
        self._is_new_call = True
        self._has_failed = False

    def __call__(
        self,
        function: Callable[..., Any],
        net: nn.Module,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run `function(net, args, kwargs)`."""
        if active.observer is not None:
            return active.observer.network(function, net, args, kwargs)
        if self._has_failed:
            return _run(function, net, args, kwargs)
        inputs = filter(torch.is_tensor, (*args, *kwargs.values()))
        if are_transformed([*inputs, *islice(net.parameters(), 1)]):
            return function(net, args, kwargs)  # whose kernels raise an error
        known = None if active.call is None else active.call.modules
        modules = known if known and known[0] is net else net.modules()
        hooks, has_backward_hooks = hooks_of(modules)  # on which TorchDynamo does not guard
        if has_backward_hooks or has_global_hooks():  # which it does not trace
            self.report.clear()
            self.report.note("not captured: there are backward hooks, or hooks of all modules")
            return _run(function, net, args, kwargs)
        self._is_new_call, self.report.has_run, self.report.net = True, False, net
        key = function, *hooks, current_policy()
        compiled = self._compiled.get(key)
        if compiled is None and hooks and len(self._compiled) >= MAX_CAPTURED:
            self.report.note("too many different hooks: the last call was not captured")
            return _run(function, net, args, kwargs)
        if compiled is None:
            compiled = self._compiled[key] = self._compile(function)
        outer, active.captures = active.captures, True
        try:
            with whole_graphs():
                result = compiled(net, args, kwargs)
        except Exception as error:
            if self.report.has_run:
                raise
            first, *more = str(error).strip().splitlines() or [type(error).__name__]
            cause = f" {more[0]}" if more and first.endswith(":") else ""
            obstacle = f"capture failed: {first}{cause}"
        else:
            if not self.report.has_run and self.report.graphs:
                self._renew(key)
            if not self._is_new_call:
                self.report.leave_others()
            return result
        finally:
            active.captures, self.report.net = outer, None
        result = _run(function, net, args, kwargs)  # which raises an error of the network
        self._has_failed = True
        self.report.clear()
        self.report.note(obstacle)
        return result

    def _renew(self, key: Any) -> None:
        """Drop the graphs of a function after a call that TorchDynamo has refused to capture."""
        if self._renewals < MAX_RENEWALS:
            self._renewals += 1
            self._compiled.pop(key, None)  # unless another thread has
        else:
            self.report.note("too many shapes and modes: the last call was not captured")

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # TorchDynamo stores graphs with the code of a function, and only a few for each, so that
        # each network needs code of its own.
        assert isinstance(function, FunctionType)
        code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
        own = FunctionType(code, function.__globals__, function.__name__)
        compiled: Callable[..., Any] = torch.compile(own, backend=self._backend)
        return compiled

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Graph:
        if self._is_new_call:
            self._is_new_call = False
            self.report.clear()
        return compile_graph(gm, example_inputs, self.report, self.mode, chunks_of_call())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_compiled": {}, "_renewals": 0, "_has_failed": False}


def chunks_of_call() -> int | None:
    """The number of segments that the policy of the running call asks for; None for no segments."""
    policy = current_policy()
    return policy.chunks if isinstance(policy, Checkpoint) else None


def _run(function: Callable[..., Any], *args: Any) -> Any:
    """Run what cannot be captured, under `Checkpoint` as a single segment."""
    return function(*args) if chunks_of_call() is None else checkpoint(function, *args)


# `spikefuse.nn` does not know this package.
Checkpoint.capture = Captured
