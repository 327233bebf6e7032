"""Rows measured one after the other: what the scripts that are meant for a GPU have in common."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from benchmarks import record
from benchmarks.runner import first_line


class Titled(Protocol):
    """One measurement."""

    @property
    def title(self) -> str: ...


Row = TypeVar("Row", bound=Titled)
Found = dict[str, Any]


def parser(name: str, doc: str | None, rounds: int, within: float) -> argparse.ArgumentParser:
    """The options that all have; `rounds` and `within` are what is usual."""
    made = argparse.ArgumentParser(f"benchmarks.{name}", description=doc)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.set_defaults(usual_rounds=rounds)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--rounds", type=int, help=f"turns of each contender ({rounds})")
    made.add_argument("--within", type=float, default=within, help="seconds; later rows left out")
    made.add_argument("--name", default=name, help="of the result; another keeps that one")
    made.add_argument("--out", type=Path, help="folder for the result (benchmarks/results)")
    made.add_argument("--quick", action="store_true", help="a trial: small shapes, few rounds")
    return made


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (2 if args.quick else args.usual_rounds)
    del args.usual_rounds
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.device == "cpu" and not args.quick:
        parser.error("the rows are sized for a GPU: add --quick for a trial on the CPU")
    return args


def run(
    args: argparse.Namespace,
    rows: Iterable[Row],
    measure_one: Callable[[Row], Found],
    progress: Callable[[Row, Found], str],
    bars: Callable[[Row, Found | None], list[Found]],
) -> Path:
    """Measure the rows while there is time, and write the result after each.

    Args:
        args: what `parse` gave.
        progress: what to print about a row.
        bars: of a row, or of one that could not be measured; asked on a GPU only.
    """
    device = torch.device(args.device)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "quick", "device", "name")}
    result = record.document(args.name, device, args.quick, settings)
    into = record.folder(args.out, args.quick)
    result |= {"rows": [], "left_out": [], "bars": []}
    path, started = None, time.perf_counter()
    for row in rows:
        seconds, found = time.perf_counter() - started, None
        try:
            if seconds >= args.within:
                raise TimeoutError("the time is up")
            found = measure_one(row)
            said = f"{row.title}{progress(row, found)}"
            result["rows"].append(found)
        except Exception as error:  # whatever it is: the other rows are still measured
            late = isinstance(error, TimeoutError)
            reason = f"left out, {error if late else first_line(error)}"
            said = f"{row.title}: {reason}"
            result["left_out"].append({"row": row.title, "reason": reason})
        print(f"[{seconds:.0f} s] {said}", flush=True)
        release(device)
        if device.type == "cuda" and not args.quick:
            result["bars"] += bars(row, found)
        path = record.write(into, result)  # now: a later row may end the process
    path = path or record.write(into, result)
    record.print_bars(result["bars"])
    print(f"wrote {path}, {time.perf_counter() - started:.0f} s")
    return path


def release(device: torch.device) -> None:
    """Hand back a row's memory, which the next one needs in other sizes."""
    gc.collect()
    if device.type != "cuda":
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:  # after a kernel that failed, every call does
        print(f"torch.cuda.empty_cache: {first_line(error)}", flush=True)
