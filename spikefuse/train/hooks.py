"""Hooks of a class that run also where a subclass overrides them without `super()`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

H = TypeVar("H", bound=Callable[..., Any])


def kept(hook: H) -> H:
    """Decorate a hook of a `KeepsHooks`."""

    @functools.wraps(hook)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._hooks_run.add(hook.__name__)
        return hook(self, *args, **kwargs)

    run.is_kept = run.is_ours = True  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


class KeepsHooks:
    """Base of a class whose hooks, decorated by `kept`, run after those of a subclass that does not
    call them: the hooks of Lightning's classes do nothing, so that users override them freely."""

    _hooks_run: set[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[1:]:
            for name, hook in vars(base).items():
                found = getattr(cls, name)
                if getattr(hook, "is_ours", False) and not getattr(found, "is_kept", False):
                    setattr(cls, name, _completed(found, hook))


def _completed(override: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(override)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._hooks_run.discard(hook.__name__)
        result = override(self, *args, **kwargs)
        if hook.__name__ in self._hooks_run:
            return result
        ours = hook(self, *args, **kwargs)
        if ours is None:
            return result
        # Callbacks of both.
        return [*ours, *(result if isinstance(result, Sequence) else [result])]

    run.is_kept = True  # type: ignore[attr-defined]
    return run
