"""Hooks of a class that run also where a subclass overrides them without `super()`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

H = TypeVar("H", bound=Callable[..., Any])


def required(hook: H) -> H:
    """Decorate a hook of a `CompletesHooks`."""

    @functools.wraps(hook)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._called_hooks.add(hook.__name__)
        return hook(self, *args, **kwargs)

    run.is_completed = run.is_required = True  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


class CompletesHooks:
    """Base of a class whose `required` hooks run after those of a subclass that does not call them:
    the hooks of Lightning's own classes do nothing, so that users override them freely."""

    _called_hooks: set[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[1:]:
            for name, hook in vars(base).items():
                found, is_required = getattr(cls, name), getattr(hook, "is_required", False)
                if is_required and not getattr(found, "is_completed", False):
                    setattr(cls, name, _completed(found, hook))


def _completed(override: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(override)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._called_hooks.discard(hook.__name__)
        result = override(self, *args, **kwargs)
        if hook.__name__ in self._called_hooks:
            return result
        ours = hook(self, *args, **kwargs)
        if ours is None:
            return result
        # Callbacks of both.
        return [*ours, *(result if isinstance(result, Sequence) else [result])]

    run.is_completed, run.is_required = True, False  # type: ignore[attr-defined]
    return run
