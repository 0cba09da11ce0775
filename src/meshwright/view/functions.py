"""Custom ``autograd.Function`` s, which are not torch functions: no function mode sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Handler = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def custom_functions(handler: Handler) -> Iterator[None]:
    """While on, ``MyFunction.apply(*args)`` is ``handler(apply, MyFunction, args, kwargs)``.

    There is no public hook: for the time of a forward the class method is ours. Contexts nest; the last is asked first.
    """
    base: Any = torch.autograd.function._SingleLevelFunction  # where ``Function.apply``, kept by a model, ends up
    outer = base.__dict__.get("apply")

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        def plain(*args: Any, **kwargs: Any) -> Any:
            if outer is not None:
                return outer.__func__(function, *args, **kwargs)
            return super(base, function).apply(*args, **kwargs)

        if function.__module__.startswith(("torch.distributed.", "meshwright.")):
            return plain(*args, **kwargs)
        return handler(plain, function, args, kwargs)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        if outer is None:
            del base.apply
        else:
            base.apply = outer
