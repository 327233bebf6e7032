"""Triton's interpreter and TorchDynamo without work that has no effect."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch._dynamo.guards


def hasten() -> None:
    """Omit overflow checks, which the interpreter computes and ignores, and repeated patches: a
    third of its time. TorchDynamo measures the guards of each graph, a sixth of the time of a small
    one, for which it flushes the caches of the processor."""
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    if os.environ.get("TRITON_INTERPRET") != "1" or not importlib.util.find_spec("triton"):
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # only in debug mode does a check raise
        builder.options = replace(builder.options, sanitize_overflow=False)
    if hasattr(interpreter, "_LangPatchScope"):  # other versions patch in other ways
        interpreter._patch_lang = _patch_once(interpreter)


def _patch_once(interpreter: Any) -> Callable[[Any], Any]:
    """Patch the language for a kernel, but not again for each function that the kernel calls."""
    patch, language = interpreter._patch_lang, interpreter.tl

    @cache
    def visible(function: Any) -> list[Any]:
        values = function.__globals__.values()
        return [x for x in (language, language.core) if any(value is x for value in values)]

    def patch_once(function: Any) -> Any:
        if any(language.core.is_builtin(x.load) for x in visible(function)):
            return patch(function)
        return interpreter._LangPatchScope()

    return patch_once
