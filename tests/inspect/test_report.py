"""`report`: operations of small networks are those counted by hand."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.inspect.energy import HARDWARE, Accesses
from spikefuse.nn import EventLinear, encode

T, B = 3, 2


def spikes(*shape: int, rate: float = 0.4) -> Tensor:
    return (torch.rand(shape) < rate).float()


def rows(report: sf.report) -> dict:
    return {row.name: row for row in report.layers}


def test_quantized_layers_are_one_row_each() -> None:
    net = sf.Temporal(nn.Sequential(nn.Linear(4, 6), sf.LIF(), nn.Linear(6, 3, bias=False)))
    x = torch.rand(T, B, 4)
    quantized = sf.report(sf.quantize(net, x), [x])
    plain = sf.report(net, [x])
    assert list(rows(quantized)) == list(rows(plain)) == ["net.0", "net.1", "net.2"]
    assert [row.parameters for row in quantized.layers] == [30, 0, 18]
    assert quantized.multiplies == plain.multiplies
    assert not quantized.not_counted


def test_a_network_by_hand() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),  # on an image: MACs
        sf.LIF(threshold=0.3),
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),  # on spikes
        nn.MaxPool2d(2),
        sf.LIF(threshold=0.3),
        nn.Conv2d(6, 6, 1),
        sf.LIF(threshold=0.5),
        nn.AvgPool2d(2),  # averages are not binary
        nn.Flatten(),
        nn.Linear(6, 10),
        sf.LI(),
    )
    net, x = sf.Temporal(net), torch.rand(T, B, 1, 8, 8)
    for conv in (net.net[2], net.net[5]):
        conv.weight.data.abs_()
    batches = [x, torch.rand(T, B, 1, 8, 8)]
    report = sf.report(net, batches)
    assert report.samples == 2 * B
    found = rows(report)
    assert found["net.0"].multiplies == found["net.0"].ann * T == T * 64 * 4 * 9
    assert found["net.0"].accumulates == 0

    # By hand: the spikes under each window of the second convolution.
    adds = [0.0, 0.0]
    fired: dict[str, list[Tensor]] = {"net.1": [], "net.4": [], "net.6": []}
    for batch in batches:
        with sf.record(net, list(fired)) as record, torch.no_grad():
            net(batch)
        for name, values in fired.items():
            values.append(record[name]["spikes"])
        s = F.pad(fired["net.1"][-1], (1, 1, 1, 1))
        for row, column in itertools.product(range(4), range(4)):
            window = s[..., 2 * row : 2 * row + 3, 2 * column : 2 * column + 3]
            adds[0] += window.sum().item() * 3  # 6 outputs in 2 groups
        adds[1] += fired["net.4"][-1].sum().item() * 6
    assert found["net.2"].accumulates == adds[0] / (2 * B) > 0
    assert found["net.2"].ann == 16 * 6 * 2 * 9
    assert found["net.5"].accumulates == adds[1] / (2 * B) > 0
    assert found["net.9"].multiplies == T * 60
    assert found["net.9"].ann == 60
    for name, values in fired.items():
        s = torch.stack(values)
        assert found[name].rate == pytest.approx(s.mean().item())
        assert found[name].dead == pytest.approx((s.sum((0, 1, 2)) == 0).float().mean().item())
        full = (s.sum((0, 1, 2)) == 2 * T * B).float().mean().item()
        assert found[name].saturated == pytest.approx(full)
    assert any(found[name].dead for name in fired)

    # Memory: the image, and the spikes of net.1, which net.2 reads.
    emitted = torch.stack(fired["net.1"]).sum().item() / (2 * B)
    macs = T * 64 * 4 * 9
    assert found["net.0"].accesses == Accesses(macs, 0.0, 0.0, macs, T * 64 * 4)
    assert found["net.1"].accesses == Accesses(0.0, T * 256, T * 256, 0.0, emitted)
    read = adds[0] / (2 * B)
    assert found["net.2"].accesses == Accesses(read, read, read, emitted, 0.0)
    assert found["net.2"].ann_accesses == Accesses(16 * 6 * 18, 0, 0, 16 * 6 * 18, 16 * 6)
    assert found["net.10"].accesses == Accesses(0.0, T * 10, T * 10, 0.0, T * 10)

    assert report.rates.keys() == fired.keys()  # potentials of LI are no spikes

    multiplies = T * (64 * 4 * 9 + 60)
    ann = 64 * 4 * 9 + 16 * 6 * 2 * 9 + 4 * 36 + 60
    assert (report.multiplies, report.ann) == (multiplies, ann)
    assert report.energy == pytest.approx(0.9e-12 * sum(adds) / (2 * B) + 4.6e-12 * multiplies)
    assert report.ann_energy == pytest.approx(4.6e-12 * ann)
    assert report.parameters == sum(p.numel() for p in net.parameters())
    assert report.not_counted == ()


def test_spikes_of_a_neuron_that_returns_others() -> None:
    class Outputs(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            self.lif, self.names = sf.LIF(threshold=0.5), names

        def forward(self, x: Tensor) -> Tensor:
            results = self.lif(x, outputs=self.names)
            assert len(results) == len(self.names)
            return results[0]

    x = torch.rand(T, B, 4)
    for names in (("h",), ("v", "spikes"), ("spikes", "v")):
        report = sf.report(sf.Temporal(Outputs(*names)), [x])
        assert report.rates == {"net.lif": pytest.approx(sf.LIF(threshold=0.5)(x).mean().item())}


def test_estimates(tmp_path: Path) -> None:
    net = sf.Temporal(nn.Sequential(sf.LIF(threshold=0.3), nn.Linear(20, 30), sf.LI()))
    report = sf.report(net, [torch.rand(T, B, 20)])
    _, linear, _ = report.layers
    added, fired = linear.accumulates, linear.accesses.spike_reads
    assert added == 30 * fired > 0
    result = report.estimate("7nm-int8", "dram")
    part = result["layers"]["net.1"]  # 7 nm: 0.007 pJ, 350/8 pJ in DRAM, 8.5/8 pJ in SRAM
    assert part["operations"] == pytest.approx(0.007e-12 * added)
    assert part["weights"] == pytest.approx(350e-12 / 8 * added)
    assert part["states"] == pytest.approx(8.5e-12 / 8 * 2 * added)
    assert part["spikes"] == pytest.approx(8.5e-12 / 8 * fired)
    assert part["total"] == pytest.approx(sum(part.values()) - part["total"])
    assert result["total"]["total"] == sum(p["total"] for p in result["layers"].values())
    assert result["ann"]["weights"] == pytest.approx(350e-12 / 8 * 600)
    assert report.estimate()["total"]["operations"] == pytest.approx(report.energy)
    assert report.estimate(HARDWARE["45nm-int8"]) == report.estimate("45nm-int8")
    for wrong in (("3nm", "sram"), ("7nm-int8", "disk")):
        with pytest.raises(ValueError, match="expected one of 45nm-float32, 45nm-int8, 7nm-float"):
            report.estimate(*wrong)
    report.save(tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["estimates"]["7nm-int8, weights in dram"] == result
    assert content["layers"][1]["accesses"]["weight_reads"] == added
    assert content["accumulates"] == report.accumulates


def test_sums_in_residual_networks_are_not_binary() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.after = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)
            self.first, self.second = sf.LIF(threshold=0.1), sf.LIF(threshold=0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.first(self.a(x)) + self.second(self.b(x)))

    torch.manual_seed(0)
    report = rows(sf.report(sf.Temporal(Sum()), [spikes(T, B, 4, rate=0.8)], memory=False))
    assert report["net.after"].multiplies == T * 8 * 3
    assert report["net.after"].accumulates == 0
    assert report["net.a"].multiplies == 0 < report["net.a"].accumulates


def test_the_same_input_at_each_step_is_counted_once() -> None:
    torch.manual_seed(0)
    net = sf.Temporal(nn.Sequential(nn.Linear(4, 8), sf.LIF(), nn.Linear(8, 3)))
    found = rows(sf.report(net, [encode.direct(torch.rand(B, 4), T)]))
    assert found["net.0"].multiplies == found["net.0"].ann == 32
    assert found["net.2"].ann == 24


class Firing(nn.Module):
    """One step of a loop whose neurons fire at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.lif = sf.LIF(threshold=-100.0)

    def forward(self, x: Tensor, last: Tensor) -> Tensor:
        return self.lif(x + last)


@pytest.mark.parametrize("kind", ["neuron", "loop", "psn", "feedback"])
def test_the_same_spikes_at_each_step_are_counted_at_each(kind: str) -> None:
    psn = sf.PSN(T)
    nn.init.constant_(psn.bias, 100.0)
    layer = {
        "neuron": Firing().lif,
        "loop": sf.Loop(Firing(), (8,)),
        "psn": psn,
        "feedback": sf.nn.Feedback(nn.Linear(8, 8), Firing().lif),
    }[kind]
    x = torch.rand(T, T, 8)
    assert sf.Temporal(layer)(x).eq(1).all()
    found = rows(sf.report(sf.Temporal(nn.Sequential(layer, nn.Linear(8, 3))), [x]))
    assert found["net.1"].accumulates == T * 8 * 3
    if kind == "feedback":
        assert found["net.0.body"].accumulates == (T - 1) * 8 * 8


def test_attention_is_counted() -> None:
    torch.manual_seed(0)
    net = sf.models.spikformer(
        lambda: sf.LIF(threshold=0.2), 3, 10, (32, 32), depth=1, channels=16, num_heads=2
    )
    net = sf.fuse(sf.Temporal(net))
    report = sf.report(net, [encode.direct(torch.rand(B, 3, 32, 32), T)], memory=False)
    assert report.not_counted == ()
    (attention,) = (row for row in report.layers if row.module == "SpikingSelfAttention")
    assert attention.ann == 2 * 64 * 16 * 8  # k^T v, then q with it: 64 tokens, heads of 8
    assert 0 < attention.accumulates + attention.multiplies < T * attention.ann


def test_layers_of_events() -> None:
    torch.manual_seed(0)
    lif = sf.LIF(surrogate=sf.surrogate.FastSigmoid(10.0, cutoff=-0.5))
    layers = [EventLinear(20, 30, lif), EventLinear(30, 5)]
    nn.init.uniform_(layers[0].weight, 0, 0.5)
    net, x = sf.Temporal(nn.Sequential(*layers)), spikes(T, B, 20)
    found = rows(sf.report(net, [x]))
    with sf.record(net) as record, torch.no_grad():
        net(x)
    hidden = record["net.0.neuron"]["spikes"]
    assert found["net.0"].accumulates == x.sum() * 30 / B
    assert found["net.0"].ann == 20 * 30
    added, fired = found["net.0"].accumulates, hidden.sum().item() / B
    states = added + T * 30
    assert found["net.0"].accesses == Accesses(added, states, states, x.sum().item() / B, fired)
    assert found["net.0"].rate == pytest.approx(hidden.mean().item())
    assert found["net.1"].accumulates == hidden.sum() * 5 / B > 0
    assert sum(row.parameters for row in found.values()) == sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_the_network_is_left_unchanged(fused: bool) -> None:
    torch.manual_seed(0)
    net = sf.Temporal(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), sf.LIF(), nn.Dropout()))
    net = sf.fuse(net) if fused else net
    x = torch.rand(T, B, 4)
    before, state = [b.clone() for b in net.buffers()], torch.get_rng_state()
    found = rows(sf.report(net, [x, x]))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, net.buffers(), before))
    assert found["net.2"].rate > 0
    saved = {row.name: row.now for row in sf.explain(net, x).saved if row.now}
    assert {name: row.saved for name, row in found.items() if row.saved} == saved
    with torch.no_grad():
        assert rows(sf.report(net, [x]))["net.0"].saved is None


def test_checkpointed_networks() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), sf.LIF(), nn.Linear(8, 3))
    x, found = torch.rand(T, B, 4), []
    for memory in (None, sf.memory.Checkpoint()):
        found.append(sf.report(sf.fuse(sf.Temporal(layers, memory=memory)), [x]))
    plain, other = map(rows, found)
    for name, row in plain.items():
        assert (row.rate, row.accumulates) == (other[name].rate, other[name].accumulates)
    assert found[0].accumulates > 0
    saved = [sum(row.saved for row in report.layers) for report in found]
    assert saved[0] >= saved[1] > 0


def test_feedback_of_recurrent_layers_is_counted() -> None:
    torch.manual_seed(0)
    layer = sf.Recurrent(sf.LIF(0.75, 0.5), 12, heads=3, self_connections=False)
    x = torch.rand(T, B, 12)
    (found,) = (row for row in sf.report(sf.Temporal(layer), [x]).layers if row.name == "net")
    fed_back = layer(x)[:-1]
    assert fed_back.any()
    assert found.accumulates == pytest.approx(fed_back.sum().item() * 3 / B)
    assert found.ann == 12 * 3
    assert found.nonzero == pytest.approx(fed_back.sum().item() / (T * B * 12))
    graded = sf.report(sf.Temporal(sf.Recurrent(sf.IntegerLIF(), 12)), [4 * x])
    assert graded.multiplies == T * 12 * 12
    assert graded.not_counted == ()


@pytest.mark.parametrize("binary", [True, False])
def test_synapses_with_delays_have_one_weight_each(binary: bool) -> None:
    torch.manual_seed(0)
    steps = 6
    layer = sf.DelayedLinear(5, 7, max_delay=4).eval()
    x = spikes(steps, B, 5) if binary else torch.rand(steps, B, 5)
    delays = layer.delays()
    arriving = sum(
        x[t, b, j].item()
        for t, b, i, j in itertools.product(range(steps), range(B), range(7), range(5))
        if t + delays[i, j] < steps
    )
    net = sf.Temporal(layer)
    report = sf.report(net, [x])
    (row,) = report.layers
    assert row.ann == 5 * 7
    assert row.nonzero == pytest.approx(x.count_nonzero().item() / x.numel())
    if binary:
        assert 0 < arriving < x.sum().item() * 7
        assert row.accumulates == pytest.approx(arriving / B)
    else:
        assert (row.accumulates, row.multiplies) == (0, steps * 5 * 7)
    (training,) = sf.report(net.train(), [x]).layers
    assert training.ann == 5 * 7 * 5


def test_neurons_with_feedback_through_a_module_are_counted() -> None:
    torch.manual_seed(0)
    layer = sf.nn.Feedback(nn.Linear(12, 12, bias=False), sf.LIF(0.75, 0.5))
    x = torch.rand(T, B, 12)
    found = rows(sf.report(sf.Temporal(layer), [x]))
    spikes = layer(x)
    assert found["net.neuron"].rate == pytest.approx(spikes.mean().item())
    assert found["net.body"].accumulates == pytest.approx(spikes[:-1].sum().item() * 12 / B)


class Reading(nn.Module):
    """One step of a layer that reads its last spikes."""

    def __init__(self, layer: sf.nn.Feedback) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12, bias=False)
        self.body, self.neuron = layer.body, layer.neuron

    def forward(self, x: Tensor, last: Tensor) -> Tensor:
        return self.neuron(self.first(x) + self.body(last))


@pytest.mark.parametrize("alone", [False, True])
def test_loops_are_counted_as_the_same_layers_without_one(alone: bool) -> None:
    torch.manual_seed(0)
    layer, x = (
        sf.nn.Feedback(nn.Linear(12, 12, bias=False), sf.LIF(0.75, 0.5)),
        torch.rand(T, B, 12),
    )
    body = Reading(layer)
    loop = sf.Loop(body, (12,))
    net = nn.Sequential(body.first, layer)
    with torch.no_grad():
        found = rows(sf.report(loop if alone else sf.Temporal(loop), [x]))
        expected = rows(sf.report(sf.Temporal(net), [x]))
    prefix = "body." if alone else "net.body."
    for name, other in (("first", "net.0"), ("body", "net.1.body")):
        row = found[prefix + name]
        assert row.ann == expected[other].ann == 144
        assert row.accumulates == pytest.approx(expected[other].accumulates)
        assert row.multiplies == pytest.approx(expected[other].multiplies)


class OwnProduct(nn.Module):
    """Computes a product of spikes and a weight by a function of its own."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.lif, self.product = sf.LIF(threshold=0.3), product
        self.weight = nn.Parameter(torch.rand(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.lif(x), self.weight)


@pytest.mark.parametrize(
    "product", [partial(torch.einsum, "bi,ij->bj"), partial(torch.tensordot, dims=1)]
)
def test_functions_that_call_products_are_counted(product: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    net, x = sf.Temporal(OwnProduct(product, 4, 6)), torch.rand(T, B, 4)
    found = rows(sf.report(net, [x]))
    assert found["net"].accumulates == net.net.lif(x).sum().item() * 6 / B > 0
    assert found["net"].ann == 4 * 6


def test_weights_are_not_spikes() -> None:
    net = sf.Temporal(OwnProduct(torch.matmul, 4, 6))
    nn.init.zeros_(net.net.weight)
    torch.manual_seed(0)
    x = torch.rand(T, B, 4)
    found = rows(sf.report(net, [x]))
    assert found["net"].accumulates == net.net.lif(x).sum().item() * 6 / B > 0


class Masked(nn.Module):
    """A linear layer that computes `W x`, and may mask `W`."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.weight, self.masked = nn.Parameter(torch.rand(6, 4)), masked
        self.register_buffer("mask", torch.ones(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.mask * self.weight if self.masked else self.weight
        return torch.mm(weight, x.t()).t()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("values", ["spikes", "numbers", "constant"])
def test_a_weight_on_the_left_of_a_product(masked: bool, values: str) -> None:
    """The report is that of the same layer with its weight on the right."""
    torch.manual_seed(0)
    layer, linear = Masked(masked), nn.Linear(4, 6, bias=False)
    x = spikes(T, B, 4) if values == "spikes" else torch.rand(T, B, 4)
    if values == "constant":
        x = x[:1].expand(T, B, 4)
    reports = [sf.report(sf.Temporal(nn.Sequential(m, sf.LIF())), [x]) for m in (layer, linear)]
    found, expected = (rows(report)["net.0"] for report in reports)
    assert found.multiplies == (
        0 if values == "spikes" else 24 * (1 if values == "constant" else T)
    )
    for name in ("accumulates", "multiplies", "ann", "nonzero", "accesses", "ann_accesses"):
        assert getattr(found, name) == getattr(expected, name), name


def test_pruned_weights_are_no_spikes() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(4, 6, bias=False)
    linear.weight.data.sign_()
    net, x = sf.Temporal(nn.Sequential(linear, sf.LIF())), torch.rand(T, B, 4)
    torch.nn.utils.prune.custom_from_mask(linear, "weight", torch.ones(6, 4))
    report = sf.report(net, [x])
    assert (report.accumulates, report.multiplies) == (0, T * 24)


@pytest.mark.parametrize("order", [None, 2])
def test_parallel_neurons_read_spikes(order: int | None) -> None:
    torch.manual_seed(0)
    net = sf.Temporal(nn.Sequential(sf.LIF(threshold=0.4), sf.PSN(T, order)))
    x = torch.rand(T, B, 4)
    s = net.net[0](x)
    found = rows(sf.report(net, [x]))["net.1"]
    assert found.nonzero == pytest.approx(s.mean().item())
    assert found.accesses.spike_reads == s.sum().item() / B > 0
    assert found.accumulates == s.sum().item() * T / B


def test_a_buffer_of_the_type_of_a_weight_is_no_weight() -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            buffer = self.weight.new_empty(x.shape)
            buffer[:] = x
            return buffer @ self.weight

    x = spikes(T, B, 4)
    found = rows(sf.report(sf.Temporal(nn.Sequential(Buffered(), sf.LIF())), [x]))["net.0"]
    assert (found.accumulates, found.multiplies) == (x.sum().item() * 6 / B, 0)


def test_unknown_operations_are_named() -> None:
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return F.bilinear(x, x, weight)

    report = sf.report(sf.Temporal(OwnProduct(product, 5, 4, 4)), [torch.rand(T, B, 4)])
    assert report.not_counted == ("net",)
    assert "not counted, since their operations are unknown: net" in str(report)


def small() -> sf.report:
    torch.manual_seed(0)
    net = sf.Temporal(nn.Sequential(nn.Linear(4, 8), sf.LIF(threshold=0.3), nn.Linear(8, 3)))
    return sf.report(net, [torch.rand(T, B, 4)])


def test_tables(tmp_path: Path) -> None:
    report = small()
    text = str(report)
    assert text.splitlines()[0].split()[:5] == ["layer", "module", "rate", "dead", "saturated"]
    assert "0.9 pJ per AC and 4.6 pJ per MAC" in text
    assert "Memory accesses" in text
    report.save(tmp_path / "report.md")
    markdown = (tmp_path / "report.md").read_text()
    assert markdown.startswith(report.to_markdown())
    columns = {line.count("|") for line in markdown.splitlines() if line.startswith("|")}
    assert len(columns) == 1
    assert "| net.0 | Linear |" in markdown
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    report.save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<tr>") == 5
    assert "data:image/png;base64," in page
    with pytest.raises(ValueError, match=r"name that ends in .html, .md, .json"):
        report.save(tmp_path / "report.pdf")


def test_tables_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = small()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert report.to_markdown()
    with pytest.raises(ModuleNotFoundError, match=r'pip install "spikefuse\[plot\]"'):
        report.save(tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_errors() -> None:
    net, x = sf.Temporal(nn.Sequential(nn.Linear(4, 8), sf.LIF())), torch.rand(T, B, 4)
    with pytest.raises(TypeError, match=r"batches is a Tensor: expected .* such as \[x\]"):
        sf.report(net, x)
    with pytest.raises(ValueError, match="batches is empty"):
        sf.report(net, [])
    with pytest.raises(ValueError, match="runs without a Temporal"):
        sf.report(nn.Linear(4, 8), [x])


def test_sew_resnet18_has_the_published_multiplications() -> None:
    """2.75 G MACs at 224 x 224: Chen et al., "Training Full Spike Neural Networks via Auxiliary
    Accumulation Pathway", 2023, which also counts norms. Which inputs are sums of spikes depends
    on the architecture, so this does not need trained weights; the published 0.50 G ACs do."""
    torch.manual_seed(0)
    net = sf.models.sew_resnet18(lambda: sf.IF(threshold=0.5), 3, 1000, (224, 224))
    x = encode.direct(torch.randn(1, 3, 224, 224), 4)
    report = sf.report(sf.Temporal(net).train(), [x], memory=False)
    assert report.multiplies == pytest.approx(2.75e9, rel=0.02)
    assert report.ann == pytest.approx(1.814e9, rel=0.01)  # ResNet18
    assert report.parameters == 11_689_512
    assert report.accumulates > 0
    assert report.not_counted == ()
    assert math.isclose(report.energy, 0.9e-12 * report.accumulates + 4.6e-12 * report.multiplies)
