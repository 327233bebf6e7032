"""Observe captured networks as the graphs that they run as."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from spikefuse.graph import operations
from spikefuse.graph.backend import Graph, executable, noted
from spikefuse.graph.captured import Captured, chunks_of_call
from spikefuse.graph.report import GraphReport
from spikefuse.inspect.observer import OUTSIDE, CallObserver, NeuronScan, leaf, stance
from spikefuse.neurons.definition import Neuron
from spikefuse.nn.call import active, current_policy
from spikefuse.scan.program import program

_SCANS = {operations.scan, operations.run_block}


class GraphObserver(CallObserver):
    """Records what happens in one call of a model whose captured networks run as fused graphs, node
    by node.

    Attributes:
        reports: what was fused in each call of a network.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.reports: list[GraphReport] = []

    def network(
        self, function: Callable[..., Any], net: nn.Module, args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Capture and run a network."""
        graphs, layer = _Graphs(self.names.get(net, OUTSIDE), self), self.layer
        self.reports.append(graphs.report)
        # TorchDynamo would capture the hooks, too.
        self._hooks.close()
        active.observer = None
        try:
            with stance("default"):
                return graphs(function, net, args, kwargs)
        finally:
            active.observer, self.layer = self, layer
            self._hook()


class _Graphs(Captured):
    """Runs the graphs of a network, whose name in the model is `name`, node by node."""

    def __init__(self, name: str, observer: CallObserver) -> None:
        super().__init__("eager", name and f"{name}.")
        self.name, self.observer = name, observer

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Graph:
        gm = executable(gm, self.report, chunks_of_call())
        for part in gm.modules():
            if isinstance(part, fx.GraphModule):
                vars(part)["forward"] = _Nodes(part, self).run
        return noted(operations.saving_bits(gm), self.report)


class _Nodes(fx.Interpreter):
    """Tells an observer which layer a node belongs to, and which scans run."""

    def __init__(self, gm: fx.GraphModule, graphs: _Graphs) -> None:
        super().__init__(gm)
        self.graphs, self.observer = graphs, graphs.observer
        #: What the statistics of norms were computed from.
        self.read: dict[fx.Node, dict[fx.Node, Any]] = {}

    def run_node(self, node: fx.Node) -> Any:
        name = self.graphs.report.name_of(node).rstrip(".")
        module = self.observer.modules.get(name)
        self.observer.layer = self.graphs.name if module is None else name
        result = super().run_node(node)
        if node.target is operations.norm_statistics:
            self.read[node] = self._inputs(node)
        elif node.target in _SCANS and isinstance(module, Neuron):
            self.observer.scans.append(self._scan(node, name))
        return result

    def _inputs(self, node: fx.Node) -> dict[fx.Node, Any]:
        return {n: self.env[n] for n in node.all_input_nodes}

    def _scan(self, node: fx.Node, name: str) -> NeuronScan:
        statistics = [n for n in node.all_input_nodes if n in self.read]
        values = self._inputs(node)
        for each in statistics:
            values |= self.read[each]
        nodes = [n for n, x in values.items() if isinstance(x, Tensor)]

        def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            known = {**values, **dict(zip(nodes, tensors, strict=True))}
            for each in (*statistics, node):
                target: Any = each.target
                known[each] = target(*fx.node.map_arg(each.args, known.__getitem__))
            results: Sequence[Tensor] = known[node]
            return results

        kernels: Any = node.args[0]
        places = [p for p in self.graphs.report.places if p.neuron == name]
        norms = [self.observer.modules[p.norm] for p in places]
        return NeuronScan(
            name=name,
            modules=(*dict.fromkeys(norms), self.observer.modules[name]),
            tensors=[leaf(values[n]) for n in nodes],
            num_inputs=len(program(kernels).step.inputs),
            run=run,
            program=kernels,
            memory=current_policy(),
            grad=torch.is_grad_enabled(),
        )
