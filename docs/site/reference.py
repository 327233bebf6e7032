"""Complete the docstrings that the reference shows, without importing the package.

In the source, a docstring may refer to another one for parameters that both have. Here each
parameter gets its own text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

ENTRY = re.compile(r"    (?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*): (?P<text>.*(?:\n {5,}.*)*)")
SECTION = re.compile(r"(?<=^Args:\n)(?:(?: {4}.*)?\n)*(?: {4}.*)?", re.MULTILINE)
REFERENCE = re.compile(r"(?:as in|see) `(?:\w+\.)*(\w+)`[;.]?\s*")


class Reference(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        pkg["neurons.definition.Neuron"].set_member("forward", _method(pkg["nn.neuron.forward"]))
        objects = list(_objects(pkg))
        texts = {o.name: o.docstring.value for o in objects if o.docstring}
        for o in objects:
            if o.docstring:
                o.docstring.value = completed(o.docstring.value, texts)
        for field in pkg["train.config.TrainConfig"].attributes.values():
            if isinstance(field.value, griffe.ExprCall) and field.value.arguments:
                field.value = field.value.arguments[0]  # the default in `option(default, ...)`
        for o in objects:
            if o.is_class and o.docstring:
                _separate_call(o)


def completed(text: str, texts: dict[str, str]) -> str:
    """A docstring with an entry for each parameter, and code blocks as Markdown has them."""

    def section(match: re.Match[str]) -> str:
        return ENTRY.sub(lambda entry: _entries(entry, texts), match[0])

    return SECTION.sub(section, text).replace("::\n\n", ":\n\n")


def _entries(entry: re.Match[str], texts: dict[str, str]) -> str:
    names, text = entry["names"].split(", "), entry["text"]
    found = REFERENCE.match(text)
    rest = text[found.end() :] if found else ""
    mentioned = [name for name in names if f"`{name}`" in rest] or names
    lines = []
    for name in names:
        own = _described(name, texts.get(found[1], ""), texts) if found else text
        if found and own and rest and name in mentioned:
            own = f"{own.rstrip('.')}. {rest[0].upper()}{rest[1:]}"
        lines.append(f"    {name}: {own or text}")
    return "\n".join(lines)


def _described(name: str, text: str, texts: dict[str, str]) -> str:
    """What a docstring, or those that it refers to, says of a parameter."""
    section = SECTION.search(completed(text, texts))
    for entry in ENTRY.finditer(section[0] if section else text):
        if entry["names"] == name:
            return entry["text"]
    return ""


def _docstring(text: str, parent: griffe.Object, like: griffe.Docstring) -> griffe.Docstring:
    parser, options = like.parser, like.parser_options
    return griffe.Docstring(text, parent=parent, parser=parser, parser_options=options)


def _method(function: griffe.Function) -> griffe.Function:
    """A function as the method that `Neuron.forward = forward` makes of it."""
    function.docstring = None
    first, *others = function.parameters
    first.name, first.annotation = "self", None
    function.parameters = griffe.Parameters(first, *others)
    return function


def _separate_call(cls: griffe.Class) -> None:
    """Move what a docstring says about calls to the method, whose signature has the types."""
    text, found, call = cls.docstring.value.partition("\nCall: ")
    method = cls.members.get("forward") or cls.members.get("__call__")
    of_call = "Args:" in text or "__init__" not in cls.members
    if found and of_call and method is not None and not method.docstring:
        cls.docstring.value = text
        method.docstring = _docstring(f"Call: {call}", method, cls.docstring)


def _objects(package: griffe.Module) -> Iterator[griffe.Object]:
    """Everything defined in a package; names that are only imported are left out."""
    for member in package.members.values():
        if not member.is_alias:
            yield member
            yield from _objects(member)
