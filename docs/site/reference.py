"""Complete the docstrings that the reference shows, without importing the package.

In the source, a docstring may refer to another one for parameters that both have. Here each
parameter gets its own text.
"""

from __future__ import annotations

import ast
import contextlib
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
        _describe_settings(pkg["train.config.TrainConfig"])
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


def _describe_settings(cls: griffe.Class) -> None:
    """Add entries for the fields of a dataclass, `name: type = option(default, help, ...)`.

    A field without a description is not an option of the user.
    """
    lines = ["", "", "Args:"]
    for field in cls.attributes.values():
        if isinstance(field.value, griffe.ExprCall) and field.value.arguments:
            arguments = [str(a) for a in field.value.arguments]
            named = dict(a.split("=", 1) for a in arguments if re.match(r"\w+=", a))
            default, text, *others = [a for a in arguments if not re.match(r"\w+=", a)]
            text = ast.literal_eval(text).removesuffix(", or one of")
            if others and others[0] in cls.module.attributes:
                with contextlib.suppress(ValueError):
                    choices = ast.literal_eval(str(cls.module.attributes[others[0]].value))
                    text += f"; one of {', '.join(choices)}"
            shown = "".join(o for o in (*others, named.get("shown", "")) if o[:1] in ("'", '"'))
            if default == "None" and shown:
                text += f"; by default {ast.literal_eval(shown)}"
            lines.append(f"    {field.name}: {text}.")
            field.value = field.value.arguments[0]
    cls.docstring.value += "\n".join(lines)


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
