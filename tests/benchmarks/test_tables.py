"""Tables and plots are made from the committed results, and pages agree with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import overview, plots, record, sections, tables, training_sections

PLOTS = {
    "timestep_scaling": plots.timestep_scaling,
    "time_sharding": plots.time_sharding,
    "events": plots.crossover,
    "event_scaling": plots.weak_scaling,
    "reproduce_bptt": plots.learning,
    "accuracy": plots.accuracy,
    "online_memory": plots.online_memory,
}


def region(name: str) -> str:
    return f"<!-- generated:{name} begin -->old<!-- generated:{name} end -->"


@pytest.mark.parametrize("page", record.PAGES)
def test_page_is_up_to_date(page: str) -> None:
    tables.main(["--check", "--page", str(record.ROOT / page)])
    assert "None" not in "".join(re.findall(r"^\|.*", (record.ROOT / page).read_text(), re.M))


@pytest.mark.parametrize("name", tables.REGIONS)
def test_region_without_results(name: str, tmp_path: Path) -> None:
    text = tables.filled(region(name), tmp_path, tmp_path)
    command = tables.REGIONS[name][2]
    assert f"Not measured yet: run `{command}`." in text or name == "papers"


def test_how_values_are_written() -> None:
    for value in (1234.5, 45.67, 1.234, 0.4567, 0.0123):  # with three digits
        shown = float(sections.number(value).replace(",", ""))
        assert shown == pytest.approx(value, rel=5e-3)
    assert sections.by_seed([]) == ""
    assert sections.by_seed([0.9956]) == "99.56%"
    assert sections.by_seed([0.99, 0.98, 0.97]) == "99.00%, 98.00%, 97.00%; 98.00 ± 1.00%"


def test_accuracy_of_runs_that_are_not_complete() -> None:
    """The first epoch of each number of steps compiles; only complete runs have a profile."""
    rows = [
        {"name": "spikefuse", "T": 4, "seconds": 1.0, "seed": seed, "epoch": epoch,
         "accuracy": 0.8 + seed / 50, "images_per_s": speed}
        for seed in (0, 1)
        for epoch, speed in enumerate((100, 400, 410, 390), 1)
    ]  # fmt: skip
    settings = {"data": "d", "model": "m", "T": 4, "epochs": 4, "early": 0, "batch": 64, "lr": 0.1}
    result = {"rows": rows, "settings": settings | {"profile": {}}}
    _, table, command = training_sections.accuracy(result)
    options = (
        "--epochs 4 --model m --T 4 --early 0 --batch 64 --lr 0.1 --names spikefuse --seeds 0 1"
    )
    assert command == f"Command: `python -m benchmarks.accuracy {options}`."
    line = "| spikefuse | 80.00%, 82.00%; 81.00 ± 1.41% | 4.00 | 400 |"
    assert table.splitlines()[-1] == line
    profile = {"ms": {"forward": 2.0}, "augmented_images_per_s": 50_000}
    result["settings"]["profile"] = {"spikefuse, seed 0": profile}
    _, table, _, parts, _ = training_sections.accuracy(result)
    assert table.splitlines()[-1] == line
    assert parts.splitlines()[-1] == "| spikefuse | 50,000 | 2.00 |"


def test_sequences_of_runs_that_are_not_complete() -> None:
    rows = [
        {"name": "PSN", "seconds": 2.0, "seed": seed, "epoch": epoch, "accuracy": 0.9,
         "parameters": 1000, "spikes": 0.1 * (seed + epoch)}
        for seed, epoch in ((0, 1), (0, 2), (1, 1))
    ]  # fmt: skip
    settings = {"data": "MNIST", "order": "permuted", "T": 784, "epochs": 2, "batch": 256}
    _, table, command = training_sections.sequential({"rows": rows, "settings": settings})
    assert table.splitlines()[-1] == "| PSN | 90.00% | 1,000 | 0.200 | 4.00 |"
    options = "--epochs 2 --order permuted --names PSN --seeds 0 1"
    assert command == f"Command: `python -m benchmarks.sequential {options}`."


def test_overview() -> None:
    """The best of each side in the newest result; losses are bold, a few bytes have no ratio."""
    names = {"spikefuse": 2.0, "spikefuse, CUDA graph": 1.0, "nn.RNN": 0.5, "eager loop": 3.0}
    contenders = [
        {"name": n, "wall_ms": {"median": ms}, "peak_bytes": 100 if "RNN" in n else 1 << 20}
        for n, ms in names.items()
    ]
    row = {"N": 128, "T": 10, "dtype": "float32", "contenders": contenders}
    shared = {"benchmark": "recurrent", "machine": {"gpu": "NVIDIA H200"}}
    new = shared | {"date": "2026-02-01T00:00:00+00:00", "rows": [row]}
    slow = [one | {"wall_ms": {"median": 9.0}} for one in contenders]
    old = shared | {"date": "2026-01-01T00:00:00+00:00", "rows": [row | {"contenders": slow}]}
    results = [(Path("new.json"), new), (Path("old.json"), old)]
    _, _, table = overview.overview(results, Path()).partition("\n\n")
    assert table.splitlines()[2:] == [
        "| 128 recurrent neurons, T = 10 | float32 | 1.00 | eager loop | 3.00 | 3.00× | 1.00× |",
        "| 128 recurrent neurons, T = 10, without spikes | float32 | 1.00 | nn.RNN | 0.500 "
        "| **0.50×** | – |",
    ]


@pytest.mark.parametrize("page", record.PAGES)
def test_tables_fit_on_a_page(page: str) -> None:
    heads = re.findall(r"^\|(?: ---:? \|)+$", (record.ROOT / page).read_text(), re.M)
    assert max((head.count("---") for head in heads), default=0) <= 7


def test_quick_results_are_left_out(tmp_path: Path) -> None:
    (path,) = record.RESULTS.glob("first_call-*.json")
    record.write(tmp_path, record.read(path) | {"quick": True})
    assert "Not measured yet" in tables.filled(region("first-call"), tmp_path, tmp_path)
    with pytest.raises(ValueError, match="no table is called 'speed'"):
        tables.filled(region("speed"), tmp_path, tmp_path)


def test_check_changes_nothing(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(region("cpu-steps"))
    arguments = ["--page", str(page), "--results", str(tmp_path)]
    with pytest.raises(SystemExit):
        tables.main([*arguments, "--check"])
    assert page.read_text() == region("cpu-steps")
    tables.main(arguments)
    tables.main([*arguments, "--check"])


@pytest.mark.parametrize("name", PLOTS)
def test_plots(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    *_, path = sorted(record.RESULTS.glob(f"{name}*.json"))
    drawn = PLOTS[name](record.read(path), tmp_path / "plot.png")
    assert drawn is not None
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert PLOTS[name]({"rows": []}, tmp_path / "none.png") is None
