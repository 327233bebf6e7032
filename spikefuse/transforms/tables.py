"""Tables of reports, as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count


def aligned(rows: Sequence[Sequence[str]], numbers_from: int | None = None) -> list[str]:
    """Return the lines of a table; columns from `numbers_from` on are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def pad(i: int, cell: str) -> str:
        is_number = numbers_from is not None and i >= numbers_from
        return cell.rjust(widths[i]) if is_number else cell.ljust(widths[i])

    return ["  ".join(map(pad, count(), row)).rstrip() for row in rows]
