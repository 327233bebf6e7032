"""README.md says what the results say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import block, record, tables, text

NOTHING = tables.NOTHING.format(tables.BENCH)
README = """# A
<!-- generated:time-steps begin -->
old
<!-- generated:time-steps end -->
between
<!-- generated:cpu begin -->
old
<!-- generated:cpu end -->
"""


def result(benchmark: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    head = {
        "schema": record.SCHEMA,
        "benchmark": benchmark,
        "date": "2026-01-02T03:04:05+00:00",
        "quick": False,
        "revision": "0123456789abcdef",
        "dirty": False,
        "machine": {"gpu": "A GPU", "cpu": "A CPU", "cores": 2},
        "versions": {"torch": "2.11.0", "triton": "3.6.0", "numba": "0.68", "python": "3.12"},
        "rows": rows,
    }
    return head | more


def scaling_row(T: int) -> dict[str, Any]:
    return {
        "T": T,
        "N": 1000,
        "dtype": "float32",
        "num_bytes": 20_000 * T,
        "input_bytes": 8_000_000,
        "copies": [{"gb_per_s": 4.0}],
        "contenders": [
            {
                "name": "spikefuse",
                "status": "ok",
                "wall_ms": {"median": 0.01234 * T},
                "peak_bytes": 9_000_000,
            },
            {"name": "SpikingJelly node", "status": "wrong", "reason": "spikes differ"},
            {"name": "eager loop", "status": "unavailable", "reason": "not asked for"},
        ],
    }


def test_time_steps(tmp_path: Path) -> None:
    written = record.write(tmp_path, result("timestep_scaling", [scaling_row(4), scaling_row(32)]))
    written.with_suffix(".png").write_bytes(b"")
    text = tables.filled(README, tmp_path, tmp_path)
    assert "| T | spikefuse | SpikingJelly node | roofline |" in text
    assert "| 4 | 0.0494 | wrong result | 0.0200 |" in text
    assert "| 32 | 0.395 | wrong result | 0.160 |" in text
    assert "| 32 | float32 | 9 | 8 |" in text
    assert "computes something else. SpikingJelly node, T = 32: spikes differ.\n" in text
    assert "| 4 | float32" not in text
    assert "**A GPU** (PyTorch 2.11.0, Triton 3.6.0; 2026-01-02, revision 0123456789)" in text
    assert "](timestep_scaling-a-gpu.png)" in text
    assert text.count(NOTHING) == 1  # the CPU's
    assert "Bars" not in text  # none was judged
    assert "\nbetween\n" in text
    assert tables.filled(text, tmp_path, tmp_path) == text


def test_cpu(tmp_path: Path) -> None:
    row = {
        "memory": "reused",
        "T": 32,
        "N": 1000,
        "dtype": "float32",
        "copies": [{"gb_per_s": 10.0, "wall_ms": {"median": 60.0}}],
        "contenders": [
            {
                "name": name,
                "status": "ok",
                "wall_ms": {"median": ms},
                "fraction": {"wall_ms": 60 / ms},
            }
            for name, ms in (("spikefuse", 100.0), ("eager loop", 2500.0))
        ],
    }
    machine = {"cpu": "A CPU", "cores": 2}
    record.write(tmp_path, result("cpu_neuron", [row], machine=machine, dirty=True))
    text = tables.filled(README, tmp_path, tmp_path)
    assert "| reused | spikefuse | 100 | 25.0× | 60% |" in text
    assert "| reused | eager loop | 2,500 | 1.0× | 2% |" in text
    assert "| reused | the copy | 60.0 |  | 100% |" in text
    assert "**A CPU, 2 cores** (PyTorch 2.11.0, Numba 0.68; " in text
    assert "revision 0123456789 with changes)" in text


def test_bars() -> None:
    missed = {"what": "fresh: speed", "measured": 7.3573, "bar": 15.0, "met": False}
    met = {"what": "other", "measured": 1.0, "bar": 0.5, "met": True}
    line = text.bars_line({"bars": [met, missed, missed | {"what": "b", "measured": 0.9694}]})
    assert line == ["Bars missed: fresh: speed (7.36, bar 15); b (0.969, bar 15)."]
    assert text.bars_line({"bars": [met]}) == ["All bars met."]
    assert text.bars_line({"bars": []}) == []


def test_neurons(tmp_path: Path) -> None:
    def ran(name: str, ms: float, status: str = "ok") -> dict[str, Any]:
        if status != "ok":
            return {"name": name, "status": status, "reason": "why"}
        times = {"device_ms": {"median": ms}, "wall_ms": {"median": 2 * ms}}
        return {"name": name, "status": status, "fraction": {"device_ms": 0.804}} | times

    def made(group: str, *contenders: dict[str, Any], training: bool = True) -> dict[str, Any]:
        about = {"group": group, "neuron": "LIF", "T": 128, "N": 1000000, "dtype": "float32"}
        return about | {"training": training, "contenders": list(contenders)}

    rows = [
        made("lif", ran("spikefuse", 0.75), ran("SpikingJelly node", 3.0),
             ran("SpikingJelly function", 1.05)),
        made("inference", ran("spikefuse", 0.3), training=False),
        made("layout", ran("spikefuse", 0.5), ran("spikefuse, channels-last", 0.0, "wrong")),
        made("host", ran("spikefuse", 0.05), ran("SpikingJelly node", 0.0, "failed"),
             ran("bare autograd.Function", 0.065)),
    ]  # fmt: skip
    left_out = [{"row": "ALIF, T=128", "reason": "left out, RuntimeError: why"}]
    missing = {"what": "ALIF: of the roofline", "measured": None, "bar": 0.65, "met": False}
    record.write(tmp_path, result("neurons", rows, left_out=left_out, bars=[missing]))
    text = "<!-- generated:neurons begin --><!-- generated:neurons end -->"
    text = tables.filled(text, tmp_path, tmp_path)
    assert "| LIF | 128 | 1,000,000 | float32 | 0.750 | 80% | 1.05 |" in text
    assert (
        "| LIF, forward without gradients | 128 | 1,000,000 | float32 | 0.300 | 80% | – |" in text
    )
    assert "| LIF, channels-last | 128 | 1,000,000 | float32 | wrong | – | – |" in text
    assert "| T | neurons | dtype | spikefuse | bare autograd.Function |" in text
    assert "| 128 | 1,000,000 | float32 | 0.100 | 0.130 |" in text
    assert "\n\nNot measured: ALIF, T=128 (left out, RuntimeError: why).\n" in text
    assert "\n\nBars missed: ALIF: of the roofline (not measured, bar 0.65).\n" in text


def test_block(tmp_path: Path) -> None:
    def ran(name: str, ms: float) -> dict[str, Any]:
        times = {"device_ms": {"median": ms}, "fraction": {"device_ms": 0.804}}
        return {"name": name, "status": "ok"} | times

    row = {
        "row": "large, bfloat16",
        "shape": [32, 100, 64, 56, 56],
        "dtype": "bfloat16",
        "layout": "channels-last",
        "kernels": [{"part": "statistics", "kernel": "k", "us": 312.4},
                    {"part": "", "kernel": "fill", "us": 2.5}],
        "contenders": [ran("spikefuse", 3.5), ran(block.AGAIN, 4.0), ran(block.TWO, 5.0),
                       {"name": block.RIVAL, "status": "failed", "reason": "why"}],
    }  # fmt: skip
    record.write(tmp_path, result("block", [row], bars=[]))
    text = "<!-- generated:block begin --><!-- generated:block end -->"
    text = tables.filled(text, tmp_path, tmp_path)
    sizes = "32 × 100 × 64 × 56 × 56"
    assert f"| {sizes} | bfloat16 | channels-last | 3.50 | 80% | 4.00 | 5.00 | – |" in text
    assert "large, bfloat16, microseconds by kernel: statistics 312, fill 2.50." in text


def test_networks(tmp_path: Path) -> None:
    def ran(name: str, way: str, ms: float, mebibytes: int) -> dict[str, Any]:
        said = {"network": name, "way": way, "status": "ok", "wall_ms": {"median": ms}}
        return said | {"peak_bytes": mebibytes << 20}

    def made(kind: str, *contenders: dict[str, Any]) -> dict[str, Any]:
        about = {"workload": "resnet18-mnist", "dtype": "float32", "steps": kind}
        return about | {"contenders": list(contenders)}

    wrong = {"network": "SpikingJelly node", "status": "wrong", "reason": "why"}
    training = made(
        "training",
        ran("spikefuse", "eager", 6.0, 1000),
        ran("spikefuse", "CUDA graph", 5.5, 1100),
        ran("SpikingJelly function", "eager", 12.0, 2087) | {"note": "it has another surrogate"},
        wrong | {"network": "SpikingJelly function", "way": "CUDA graph"},
        wrong | {"way": "eager"},
    )
    rows = [training, made("evaluation", ran("spikefuse", "eager", 2.0, 500))]
    left_out = [{"row": "resnet34-mnist", "reason": "left out, the time is up"}]
    record.write(tmp_path, result("networks", rows, left_out=left_out, bars=[]))
    text = "<!-- generated:networks begin --><!-- generated:networks end -->"
    text = tables.filled(text, tmp_path, tmp_path)
    assert "| workload | dtype | spikefuse | SpikingJelly function |" in text
    assert "| resnet18-mnist | float32 | 6.00 / 5.50 | 12.0 / – |" in text
    assert "| resnet18-mnist | float32 | 1,000 / 1,100 | 2,087 / – |" in text
    assert "A whole evaluation step, milliseconds by the clock, eager / CUDA graph:" in text
    assert "| resnet18-mnist | float32 | 2.00 |" in text
    assert "| 500 |" not in text  # memory in training only
    assert "\n\nSpikingJelly function: it has another surrogate.\n" in text
    assert "\n\nNot measured: resnet34-mnist (left out, the time is up).\n" in text


def test_ddp(tmp_path: Path) -> None:
    eager = {"way": "eager", "processes": 2, "status": "ok", "alone_ms": {"median": 4.0}}
    eager |= {"together_ms": {"median": 4.2}, "images_per_second": 47619.0, "throughput": 1.9048}
    graph = {"way": "CUDA graph", "processes": 2, "status": "unavailable", "reason": "why"}
    fused = eager | {
        "network": "spikefuse, fused",
        "alone_bytes": 1 << 30,
        "together_bytes": 1 << 31,
    }
    settings = {"workload": "resnet18-mnist", "dtype": "bfloat16"}
    record.write(tmp_path, result("ddp", [eager, graph, fused], bars=[], settings=settings))
    text = "<!-- generated:ddp begin --><!-- generated:ddp end -->"
    text = tables.filled(text, tmp_path, tmp_path)
    assert "resnet18-mnist, bfloat16:" in text
    assert "| spikefuse, eager | 2 | 4.00 | 4.20 | 47,619 | 1.90× | – / – |" in text
    assert "| spikefuse, CUDA graph | 2 | unavailable | – | – | – | – |" in text
    assert "| spikefuse, fused, eager | 2 | 4.00 | 4.20 | 47,619 | 1.90× | 1,024 / 2,048 |" in text


def test_time_sharding(tmp_path: Path) -> None:
    layer = {"what": "layer", "T": 1024, "N": 10**6, "data": 1, "time": 2, "chunks": 8}
    layer |= {"ms": {"median": 2.5}, "speedup": 1.9, "predicted": 1.85, "by_paper": 1.99}
    net = {"what": "network", "T": 128, "batch": 16, "statistics": "shard", "data": 2, "time": 2}
    good = {
        "status": "ok",
        "ms": {"median": 100.0},
        "speedup": 3.1,
        "chunks": 4,
        "memory_of_one": 0.26,
    }
    rows = [layer, {**net, **good}, {**net, "status": "out of memory", "reason": "why"}]
    rows.append({**layer, "way": "CUDA graph", "ms": {"median": 1.5}})
    rows.append({"what": "long", "T": 1024, "time": 4, "fits_one": False, "fits": True})
    record.write(tmp_path, result("time_sharding", rows, bars=[]))
    text = "<!-- generated:time-sharding begin --><!-- generated:time-sharding end -->"
    text = tables.filled(text, tmp_path, tmp_path)
    assert "| 1,000,000 neurons, CUDA graph | 1,024 | 1 × 2 | – | 1.50 | 1.90×" in text
    assert (
        "| 1,000,000 neurons | 1,024 | 1 × 2 | – | 2.50 | 1.90× | 1.85× | 1.99× | 8 | – |" in text
    )
    assert "| Spiking-ResNet18 | 128 | 2 × 2 | shard | 100 | 3.10× | – | – | 4 | 26% |" in text
    assert "| 2 × 2 | shard | out of memory | – | – | – | – | – |" in text
    assert "T = 1,024 does not fit on one GPU, and fits on 4." in text


def test_first_call(tmp_path: Path) -> None:
    rows = [
        {"backend": "triton", "status": "failed", "reason": "exit code 1: no GPU"},
        {"backend": "numba", "neuron": "own", "status": "ok", "cold": {"median": 3.21},
         "warm": {"median": 0.456}},
    ]  # fmt: skip
    record.write(tmp_path, result("first_call", rows, bars=[]))
    text = "<!-- generated:first-call begin --><!-- generated:first-call end -->"
    text = tables.filled(text, tmp_path, tmp_path)
    assert "(PyTorch 2.11.0, Triton 3.6.0, Numba 0.68; " in text
    assert "| triton | exit code 1: no GPU | – | – |" in text
    assert "| numba | a neuron of one's own, first | 3.21 | 0.456 |" in text


@pytest.mark.parametrize("benchmark", ["timestep_scaling", "cpu_neuron"])
def test_regions_end_with_their_bars(tmp_path: Path, benchmark: str) -> None:
    bar = {"what": "a", "measured": 2.0, "bar": 1.0, "met": False}
    rows = [scaling_row(4)]
    if benchmark == "cpu_neuron":
        rows = [rows[0] | {"memory": "fresh", "contenders": []}]
        rows[0]["copies"] = [{"wall_ms": {"median": 1.0}}]
    record.write(tmp_path, result(benchmark, rows, bars=[bar]))
    text = tables.filled(README, tmp_path, tmp_path)
    assert "\n\nBars missed: a (2.00, bar 1).\n<!-- generated:" in text


def test_training(tmp_path: Path) -> None:
    text = "<!-- generated:training begin --><!-- generated:training end -->"
    nothing = tables.filled(text, tmp_path, tmp_path)
    assert "run `python -m benchmarks.training digits`" in nothing
    config = {"dataset": "digits", "model": "conv", "neuron": "lif", "num_steps": 8, "epochs": 20}
    rows = [
        {"seed": 0, "seconds": 41.234, "test_accuracy": 0.98},
        {"seed": 1, "seconds": 40.0, "test_accuracy": 0.96},
    ]
    bar = {"what": "seed 1: held-out accuracy", "measured": 0.96, "bar": 0.97, "met": False}
    machine = {"cpu": "A CPU", "cores": 2}
    for name, bars in (("digits", [bar]), ("mnist", [bar | {"met": True}])):
        settings = {"config": config | {"dataset": name}}
        made = result(f"training_{name}", rows, settings=settings, bars=bars, machine=machine)
        record.write(tmp_path, made)
    text = tables.filled(text, tmp_path, tmp_path)
    assert "| dataset | network | device | seeds | seconds | accuracy |" in text
    row = "conv, lif, T = 8, 20 epochs | A CPU, 2 cores | 0, 1 | 41.2, 40.0 | 98.00%, 96.00% |"
    assert f"| digits | {row}\n| mnist | {row}\n" in text
    assert "). Bars missed: seed 1: held-out accuracy (0.960, bar 0.97).\n- mnist: " in text
    assert "). All bars met.\n<!--" in text
    assert tables.filled(text, tmp_path, tmp_path) == text


def test_trial_runs_are_left_out(tmp_path: Path) -> None:
    record.write(tmp_path, result("timestep_scaling", [scaling_row(4)], quick=True))
    assert tables.filled(README, tmp_path, tmp_path).count(NOTHING) == 2


def test_unknown_regions_are_named(tmp_path: Path) -> None:
    text = "<!-- generated:speed begin --><!-- generated:speed end -->"
    with pytest.raises(ValueError, match="no table is called 'speed'"):
        tables.filled(text, tmp_path, tmp_path)


def test_check_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(README)
    arguments = ["--readme", str(readme), "--results", str(tmp_path)]
    with pytest.raises(SystemExit) as stopped:
        tables.main([*arguments, "--check"])
    assert stopped.value.code == 1
    assert "run python -m benchmarks.tables" in capsys.readouterr().err
    assert readme.read_text() == README
    tables.main(arguments)
    tables.main([*arguments, "--check"])


def test_this_readme_is_up_to_date() -> None:
    tables.main(["--check"])
