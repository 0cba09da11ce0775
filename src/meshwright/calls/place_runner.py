"""``PlaceRunner``: runs calls and events in their place, the trunk or a branch, and draws what all ranks must draw alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.calls.exchange import Exchange
from meshwright.calls.placeholder import sized
from meshwright.calls.stage import StageProgram
from meshwright.calls.structure import map_tensors, tensors_of
from meshwright.described import map_within
from meshwright.graph import Event


class PlaceRunner:
    """Runs functions in a place: the number of a submesh; 0 is the trunk.

    It has no tables. Random numbers have this invariant: after each event, the generator that all ranks share has the same
    state on all of them, whichever of them ran the event.

    Args:
        program: what the stage does.
        exchange: knows the rows and the random numbers of branches; needed if there are branches.
        device: the device of this rank.
        failures: of a trial: the errors of this rank's branches are added to it. None: errors are raised.
    """

    def __init__(
        self,
        program: StageProgram,
        exchange: Exchange | None,
        device: torch.device,
        failures: list[Exception] | None = None,
    ) -> None:
        self._program, self._graph, self._device, self._failures = program, program.graph, device, failures
        self._exchange_or_none = exchange

    @property
    def _exchange(self) -> Exchange:
        assert self._exchange_or_none is not None
        return self._exchange_or_none

    def run(self, place: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call or event. In a branch: on this rank's share of the rows, with the random numbers of the branch."""
        if not place:
            return forward(*args, **kwargs)
        with self._exchange.inside(place):
            args, kwargs = map_tensors(lambda t: self._exchange.take_rows(place, t), (args, kwargs))
            return forward(*args, **kwargs)

    def sized(self, place: int, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a function that takes a shape, with the number of rows that this rank runs in the place."""
        if self._exchange_or_none is None or not self._program.divides(place):
            return args
        return sized(func, args, *self._exchange.row_counts(place))

    # --- failures of branches, in a trial ---------------------------------------------------------------------------

    def failed(self, place: int, error: Exception) -> bool:
        """Notes the error of a branch, so that ones stand for its values, as other ranks wait for them.

        Returns:
            False if the error is to be raised: it is of the trunk, or this is no trial.
        """
        if not place or self._failures is None:
            return False
        self._failures.append(error)
        return True

    def ones(self, place: int, number: int, like: Tensor) -> Tensor:
        """Ones for this rank's rows of a value of a branch. ``like``: the recorded tensor."""
        return self._exchange.take_rows(place, self._exchange.ones_like(self._graph.like(number, like)))

    def ones_of_event(self, event: Event, place: int, written: Tensor | None) -> Any:
        """Ones for the results of an event of a branch. ``written``: this rank's tensor to which the event writes."""
        numbers = iter(event.outputs)

        def ones(t: Tensor) -> Tensor | None:
            number = next(numbers)
            if number is None:
                return t
            is_target = number == event.written and written is not None
            return written if is_target else self.ones(place, number, t)

        return map_within(ones, self._graph.outputs[event.path, event.index])

    # --- random numbers that all ranks share ------------------------------------------------------------------------

    def shared_draw(self, place: int, func: Any, model_args: Any, local_args: Any) -> Any:
        """A draw in a branch from random numbers of the trunk. A rank that has some of the rows draws for all rows.

        Args:
            model_args: (args, kwargs) as the model passes them.
            local_args: (args, kwargs) as this rank has them.
        """
        args, kwargs = local_args
        if not self._program.divides(place):
            return func(*args, **kwargs)
        likes = iter(tensors_of(model_args))

        def of_all_rows(t: Tensor) -> Tensor:
            like = next(likes)
            return self._exchange.padded(place, t, like) if t.shape != like.shape else t

        args, kwargs = map_tensors(of_all_rows, local_args)
        return map_tensors(lambda t: self._exchange.take_rows(place, t), func(*args, **kwargs))

    def discard_draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Draws as many numbers as another branch or stage does, and drops them: all draw from one generator, whose state must
        stay equal on all ranks."""
        ones_like = self._ones_like if self._exchange_or_none is None else self._exchange.ones_like
        args, kwargs = map_tensors(ones_like, (args, kwargs))
        with torch.no_grad():
            func(*args, **kwargs)

    def _ones_like(self, like: Tensor) -> Tensor:
        device = self._device if like.is_meta else like.device
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device).fill_(1)
