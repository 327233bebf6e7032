"""Observe the graphs that captured networks run as."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from spikefuse.graph import operations
from spikefuse.graph.backend import Graph, apply_passes
from spikefuse.graph.captured import Captured
from spikefuse.graph.nodes import module_of
from spikefuse.graph.report import Report
from spikefuse.inspect.observer import OUTSIDE, CallObserver
from spikefuse.inspect.scans import NeuronScan, leaf
from spikefuse.neurons.definition import Neuron
from spikefuse.nn.call import current_policy, saving_spikes
from spikefuse.scan.program import program

_SCANS = {operations.scan, operations.run_block}


class GraphObserver(CallObserver):
    """Records what happens in one call of a model whose captured networks run as fused graphs, node
    by node.

    Attributes:
        reports: what was fused in each network.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.reports: list[Report] = []

    def network(
        self, function: Callable[..., Any], net: nn.Module, args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Run a network as graphs."""
        graphs = _Graphs(net, self)
        self.reports.append(graphs.report)
        with self.paused():
            return graphs(function, net, args, kwargs)


class _Graphs(Captured):
    """Captures a network and runs its graphs node by node, uncut.

    Attributes:
        name: of the network in the model.
        modules: those of the network, by their names in the model.
    """

    def __init__(self, net: nn.Module, observer: CallObserver) -> None:
        self.name = observer.names.get(net, OUTSIDE)
        super().__init__("eager", f"{self.name}." if self.name else "")
        self.observer = observer
        modules = net.named_modules(remove_duplicate=False)
        self.modules = {self.name_of(path): module for path, module in modules}

    def name_of(self, path: str) -> str:
        return ".".join(filter(None, (self.name, path)))

    def label(self, neuron: str) -> str:
        """The types of a neuron and of what was fused with it."""
        places = {p.norm: p for p in self.report.places if p.neuron == neuron}
        types = [type(self.modules[norm]).__name__ for norm in places]
        types += ["residual"] * (len(places) == 1 and any(p.residual for p in places.values()))
        return " + ".join([*types, type(self.modules[neuron]).__name__])

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Graph:
        apply_passes(gm, self.report)

        def run(*args: Any) -> Any:
            with saving_spikes(current_policy()):
                return _Nodes(gm, self).run(*args)

        return run


class _Nodes(fx.Interpreter):
    """Runs a graph, and tells an observer which layer runs and which scans."""

    def __init__(self, gm: fx.GraphModule, graphs: _Graphs) -> None:
        super().__init__(gm)
        self.graphs = graphs
        #: What statistics have read.
        self.read: dict[fx.Node, dict[fx.Node, Any]] = {}

    def run_node(self, node: fx.Node) -> Any:
        graphs, name = self.graphs, self.graphs.name_of(module_of(node))
        module = graphs.modules.get(name)
        graphs.observer.layer = graphs.observer.names.get(module, name) if module else name
        result = super().run_node(node)
        if node.target is operations.norm_statistics:
            self.read[node] = self._inputs(node)
        elif node.target in _SCANS and isinstance(module, Neuron):
            graphs.observer.scans.append(self._scan(node))
        return result

    def _inputs(self, node: fx.Node) -> dict[fx.Node, Any]:
        return {n: self.env[n] for n in node.all_input_nodes}

    def _scan(self, node: fx.Node) -> NeuronScan:
        name = self.graphs.observer.layer
        statistics = [n for n in node.all_input_nodes if n in self.read]
        values = self._inputs(node)
        for each in statistics:
            del values[each]
            values |= self.read[each]
        nodes = [n for n, x in values.items() if isinstance(x, Tensor)]

        def run(tensors: Sequence[Tensor]) -> Any:
            known = {**values, **dict(zip(nodes, tensors, strict=True))}
            for each in (*statistics, node):
                known[each] = each.target(*fx.node.map_arg(each.args, known.__getitem__))
            return known[node]

        kernels: Any = node.args[0]
        return NeuronScan(
            name=name,
            label=self.graphs.label(name),
            tensors=[leaf(values[n]) for n in nodes],
            num_inputs=len(program(kernels).step.inputs),
            num_normalized=len(statistics),
            run=run,
            program=kernels,
            memory=current_policy(),
            grad=torch.is_grad_enabled(),
        )
