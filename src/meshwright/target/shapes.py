"""``Shapes``: runs a model without values, to learn the shapes of its outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from meshwright.deferred import Build


class Shapes:
    """A model without values, built at the first call. Calls do not change the state of random generators."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._model: nn.Module | None = None

    def __call__(self, batch: dict[str, Any], method: str = "forward") -> Any:
        """The output of the model, or of another of its methods, without values. Raises what the model raises."""
        import torch

        from meshwright.deferred import record
        from meshwright.planning.meta_functions import MetaFunctions
        from meshwright.planning.shadow import Shadow

        with torch.random.fork_rng(devices=[]):
            if self._model is None:
                self._model = record(self._build, draw=False).module
            with torch.no_grad(), Shadow(), MetaFunctions():
                return getattr(self._model, method)(**batch)
