"""Tables and plots are made from the committed results, and pages agree with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import convert, plots, record, tables

PAGES = (
    "docs/benchmarks.md",
    "docs/reproduce.md",
    "docs/tutorials/fast.ipynb",
    "README.md",
)
PLOTS = {
    "timestep_scaling": plots.timestep_scaling,
    "time_sharding": plots.time_sharding,
    "events": plots.crossover,
    "event_scaling": plots.weak_scaling,
    "reproduce_": plots.learning,
}


def region(name: str) -> str:
    return f"<!-- generated:{name} begin -->old<!-- generated:{name} end -->"


@pytest.mark.parametrize("page", PAGES)
def test_page_is_up_to_date(page: str) -> None:
    tables.main(["--check", "--page", str(record.ROOT / page)])


@pytest.mark.parametrize("name", tables.REGIONS)
def test_region_without_results(name: str, tmp_path: Path) -> None:
    text = tables.filled(region(name), tmp_path, tmp_path)
    command = tables.REGIONS[name][2]
    assert f"Not measured yet: run `{command}`." in text or name == "papers"


def test_regions_have_measured_times(tmp_path: Path) -> None:
    """Known values of the committed results, and no targets."""
    text = tables.filled("".join(map(region, tables.REGIONS)), record.RESULTS, record.ROOT)
    for line in (
        "| 32 | 0.211 | 0.443 | 0.296 | 7.59 | 0.678 | 0.150 |",
        "| 32×100×64×56×56 | bfloat16 | channels-last | 3.30 | 74% | 3.46 | 8.30 | 9.60 |",
        "| spikefuse, eager | 2 | 8.34 | 11.8 | 17,000 | 1.42× | – / – |",
        "| shd | 2,940 | 0.5% | 132 | 1,756 | 1,754 | 127 | 13.3× |",
        "| numba | LIF, second | 0.934 | 0.0388 |",
        "| fresh | spikefuse | 56.3 | 8.5× | 194% |",
        "![efficiency over ranks](benchmarks/results/event_scaling-nvidia-h200.png)",
        "| 1,000,000 neurons, CUDA graph | 4,096 | 1 × 4 | – | 6.07 | 3.76× | 3.57× | 3.87× | 1 | – |",  # noqa: E501
        "`bptt-on-gpu-fashion-mnist-large`",
    ):
        assert line in text, line
    assert "bar" not in text.lower()
    assert "None" not in text


def test_converted_networks() -> None:
    def contender(title: str, ms: float | None) -> dict[str, Any]:
        if ms is None:
            return {"name": title, "status": "unavailable", "reason": "no graph"}
        times = {"wall_ms": {"median": ms}, "peak_bytes": 3 << 20}
        return {"name": title, "status": "ok", **times}

    taken = (30.0, 20.0, None, 5.0)
    row = {
        "network": "Net", "steps": "training", "dtype": "float32", "T": 4, "batch": 8,
        "layout": "contiguous", "note": "neurons: triton", "fusion": "2 of 2 fused",
        "float64": {"outputs": 1234, "rates": [0.25, 0.125]},
        "contenders": [contender(*one) for one in zip(convert.TITLES, taken, strict=True)],
    }  # fmt: skip
    table, checks, neurons, reasons = tables.converted({"rows": [row]})
    line = table.splitlines()[-1]
    assert line == "| Net | training | float32 | 30.0 | 20.0 | 1.50× | – | 5.00 | – | 3 / 3 |"
    assert checks == (
        "- Net: T = 4, batches of 8, contiguous. In float64, all 1,234 outputs of neurons for two "
        "samples are equal; rates are 0.125 to 0.250. 2 of 2 fused."
    )
    assert neurons == "- neurons: triton: Net in float32."
    assert reasons == "- Net, training in float32, original, CUDA graph: no graph."


def test_quick_results_are_left_out(tmp_path: Path) -> None:
    (path,) = record.RESULTS.glob("first_call-*.json")
    record.write(tmp_path, record.read(path) | {"quick": True})
    assert "Not measured yet" in tables.filled(region("first-call"), tmp_path, tmp_path)


def test_unknown_region(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no table is called 'speed'"):
        tables.filled(region("speed"), tmp_path, tmp_path)


def test_check_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "README.md"
    page.write_text(region("cpu"))
    arguments = ["--page", str(page), "--results", str(tmp_path)]
    with pytest.raises(SystemExit) as stopped:
        tables.main([*arguments, "--check"])
    assert stopped.value.code == 1
    assert page.read_text() == region("cpu")
    tables.main(arguments)
    tables.main([*arguments, "--check"])
    assert "up to date" in capsys.readouterr().out


@pytest.mark.parametrize("value", [1234.5, 45.67, 1.234, 0.4567, 0.0123])
def test_numbers_have_three_digits(value: float) -> None:
    assert float(tables.number(value).replace(",", "")) == pytest.approx(value, rel=5e-3)


@pytest.mark.parametrize("name", PLOTS)
def test_plots(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for path in record.RESULTS.glob(f"{name}*-nvidia-h200.json"):
        result = record.read(path)
        if name.startswith("reproduce") and "curve" not in result["rows"][0]:
            continue
        drawn = PLOTS[name](result, tmp_path / "plot.png")
        if drawn is not None:
            assert drawn.read_bytes().startswith(b"\x89PNG")
            return
    pytest.fail("nothing was drawn")


def test_nothing_to_draw(tmp_path: Path) -> None:
    for draw in (plots.timestep_scaling, plots.time_sharding, plots.weak_scaling, plots.crossover):
        assert draw({"rows": []}, tmp_path / "none.png") is None
    assert not list(tmp_path.iterdir())
