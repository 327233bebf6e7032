"""Write the generated code that docs/explanation/kernels.md shows: python docs/site/emitted.py"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import spikefuse as sf

PAGE = Path(__file__).resolve().parents[1] / "explanation" / "kernels.md"
# By region: the backend, and the function of its module.
SHOWN = {
    "lif-step": ("triton", "step"),
    "lif-reverse": ("triton", "reverse"),
    "lif-forward": ("numba", "forward"),
}


def filled(text: str) -> str:
    """The page with the code of each region as it is emitted now."""
    for region, (backend, name) in SHOWN.items():
        source = sf.source(sf.LIF(), backend)
        (code,) = re.findall(rf"^(?:@\S+\n)?def {name}\(.*\n(?:(?: .*)?\n)*", source, re.MULTILINE)
        code = "\n".join(map(_wrapped, code.rstrip().split("\n")))
        fence = f'```python no-run="a part of a module"\n{code}\n```'
        begin, end = (f"<!-- generated:{region} {edge} -->" for edge in ("begin", "end"))
        text = re.sub(f"{begin}.*?{end}", f"{begin}\n{fence}\n{end}", text, flags=re.DOTALL)
    return text


def _wrapped(line: str) -> str:
    """A signature with more arguments than fit on the page, over several lines."""
    if not line.startswith("def "):
        return line
    return textwrap.fill(line, 92, subsequent_indent=" " * (line.index("(") + 1))


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
