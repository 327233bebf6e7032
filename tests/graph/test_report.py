"""What is printed of a fusion."""

from __future__ import annotations

from torch import fx, nn

from spikefuse.graph.report import Fusion, GraphReport, Place


def node_of(net: nn.Module, name: str) -> fx.Node:
    """A node that TorchDynamo has captured of a layer."""
    node, module = fx.Graph().placeholder("x"), net.get_submodule(name)
    node.meta["nn_module_stack"] = {
        str(id(net)): ("L['net']", type(net)),
        f"{id(module)}@1": ("L['___stack0']", type(module)),
    }
    return node


def test_the_table() -> None:
    net = nn.ModuleDict({n: nn.Identity() for n in ("bn1", "bn2", "bn3", "lif1", "lif2")})
    report = GraphReport("net.", net=net)
    fusion = Fusion((report,))
    assert str(fusion) == "not captured yet: the first call does it"
    nodes = {name: node_of(net, name) for name in net}
    report.graphs = 1
    report.fuse(nodes["bn1"], nodes["lif1"], residual=False)
    report.fuse(nodes["bn2"], nodes["lif2"], residual=True)
    for reason in ("its result is read by relu", "a later reason"):
        report.leave(nodes["bn3"], reason)
    assert fusion.fused == (Place("net.bn1", "net.lif1"), Place("net.bn2", "net.lif2", True))
    assert fusion.left == (Place("net.bn3", reason="its result is read by relu"),)
    assert str(fusion).splitlines() == [
        "norm     neuron",
        "net.bn1  net.lif1  fused",
        "net.bn2  net.lif2  fused, with a residual",
        "net.bn3  -         not fused: its result is read by relu",
        "2 of 3 batch norms fused with the neuron after them",
    ]


def test_breaks_and_notes() -> None:
    reports = GraphReport("a."), GraphReport("b.")
    fusion = Fusion(reports)
    reports[0].graphs = reports[1].graphs = 1
    assert fusion.summary == "0 of 0 batch norms fused with the neuron after them"
    reports[1].graphs = 3
    for _ in range(2):
        reports[0].note("capture failed: no compiler")
    assert fusion.summary == (
        "0 of 0 batch norms fused with the neuron after them, in 4 graphs; "
        "capture failed: no compiler"
    )
    for report in reports:
        report.clear()
    assert fusion.summary == "not captured yet: the first call does it"
    reports[0].note("capture failed: no compiler")
    assert fusion.summary.endswith("; capture failed: no compiler")


def test_names_without_the_network() -> None:
    """As in torch.compile, which does not say what it compiles."""
    net = nn.Sequential(nn.BatchNorm1d(6))
    report, node = GraphReport("net."), node_of(net, "0")
    assert report.name_of(node) == "net."
    node.meta["nn_module_stack"] = {"1": ("L['net'].layers.0", nn.BatchNorm1d)}
    assert report.name_of(node) == "net.layers.0"
    del node.meta["nn_module_stack"]
    assert report.name_of(node) == "net."
