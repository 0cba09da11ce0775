"""``Placed``: the parameters that a job put into its model, and whether they are still what stands there.

A person may write to parameters between steps (``p.mul_``, ``p.data.copy_``, ``load_state_dict``). What is lost unseen is
another parameter in the place of one: FSDP2 goes on with its own, a gradient of one that no plan knows is reduced by nobody,
and a DTensor does not take over what is assigned to its ``data``; and another class of a module, or, of a model in parts,
another forward: its calls were wrapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.errors import Finding, Findings
from meshwright.private import any_backward_hooks, each_held, held_of, storage_of, storages_of
from meshwright.recipe import Recipe
from meshwright.runtime.weights.fsdp import needs_fsdp
from meshwright.runtime.weights.parameters import places


class Placed:
    """The parameters of a model, as a job placed them.

    Args:
        model: with its parameters laid out, at rest.

    Attributes:
        same: the same object for as long as the parameters are the same, what this rank holds of each is, and whether each
            is trained: what was looked up of them still holds. None where FSDP2 puts others in their place during a forward.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self._model, self._recipe, self._by_fsdp = model, recipe, needs_fsdp(recipe)
        self.same: object | None = None
        self._note()

    def _note(self) -> None:
        """What stands in the model now is what it is compared with from here on."""
        self._each = modules = list(self._model.modules())
        self._classes = [*map(type, modules)]
        self._forwards = self._forwards_now()
        self._children = [m._modules for m in modules]
        self._children_then = [dict(children) for children in self._children]
        self._tables = [m._parameters for m in modules]
        self._tables_then = _contents(self._tables)
        every = {id(p): p for table in self._tables for p in table.values() if p is not None}
        self._dtensors = [p for p in every.values() if isinstance(p, DTensor)]
        self._storages = storages_of(self._dtensors)
        self._known, self._at = every, {id(table): dict(table) for table in self._tables}
        self._note_held()

    def _note_held(self) -> None:
        self._held_then, self._trains = each_held(self._dtensors), [*map(_TRAINS, self._dtensors)]
        self.same = None if self._by_fsdp else object()

    def check(self) -> None:
        """Raises PlanError with every parameter that was replaced since, and every module that got another class or forward.
        FSDP2's are at rest."""
        same = self._children == self._children_then and _contents(self._tables) == self._tables_then
        if (
            same
            and [*map(type, self._each)] == self._classes
            and all(map(is_, self._forwards_now(), self._forwards))
            and storages_of(self._dtensors) == self._storages
        ):
            if self.same is not None and not self._holds_the_same():
                self._note_held()
            return
        findings = Findings("this step")
        then = zip(self._dtensors, self._storages, strict=True)
        moved = {id(p) for p, storage in then if storage_of(p) != storage}
        for name, module, key, p in places(self._model):
            before = self._at.get(id(module._parameters), {}).get(key)
            if (finding := self._finding(name, before, p, assigned=id(p) in moved)) is not None:
                findings.extend([finding])
        classes = {id(m): cls for m, cls in zip(self._each, self._classes, strict=True)}
        for name, module in self._model.named_modules():
            if (cls := classes.get(id(module), type(module))) is not type(module):
                findings.extend([_of_another_class(name, cls, type(module))])
        forwards = {id(m): forward for m, forward in zip(self._each, self._forwards, strict=False)}
        for name, module in self._model.named_modules():
            if id(module) in forwards and vars(module).get("forward") is not forwards[id(module)]:
                findings.extend([_of_another_forward(name)])
        findings.raise_if_any()
        self._note()

    def _forwards_now(self) -> list[object]:
        """What stands on each module in place of its class's forward, of a model in parts."""
        return [vars(m).get("forward") for m in self._each] if self._recipe.in_parts else []

    def have_backward_hooks(self) -> bool:
        """Whether modules have hooks that run in a backward."""
        return any_backward_hooks(self._each)

    def _holds_the_same(self) -> bool:
        held = map(is_, each_held(self._dtensors), self._held_then)
        return all(held) and [*map(_TRAINS, self._dtensors)] == self._trains

    def _finding(self, name: str, before: Tensor | None, p: Tensor, *, assigned: bool) -> Finding | None:
        line = self._recipe.by_name.get(name)
        if line is None:
            return Finding(
                where=name,
                given="a parameter that was not there when the job was made",
                required="the parameters that were planned: nobody shards it, or reduces its gradient",
                fix="put it into the model before parallelize",
            )
        if assigned:
            return Finding(
                where=name,
                given="another tensor was assigned to its data",
                required="its own: a DTensor keeps the values that it had",
                fix="p.data.copy_(...)",
            )
        sharded = self._by_fsdp and line.data != "loose"
        if p is before or (not sharded and (id(p) in self._known or (before is not None and _alike(p, before)))):
            return None
        return Finding(
            where=name,
            given="another parameter since the job was made",
            required="the job's own, which is what is sharded and trained",
            fix="with torch.no_grad(): p.copy_(...); or job.module.load_state_dict(...)",
        )


_TRAINS = attrgetter("requires_grad")


def _of_another_class(name: str, before: type, now: type) -> Finding:
    return Finding(
        where=name or "the model",
        given=f"of another class since the job was made: {before.__name__}, now {now.__name__}",
        required="its own: calls of a module go to the forward that it had then",
        fix="give it that class before parallelize; or an attribute that its forward looks at",
    )


def _of_another_forward(name: str) -> Finding:
    return Finding(
        where=f"{name}.forward" if name else "the model's forward",
        given="another function since the job was made",
        required="the one that was planned: stages and branches run the parts of it that were recorded",
        fix="set it before parallelize; a forward hook that only looks may be put on at any time",
    )


def _contents(tables: Sequence[dict[str, nn.Parameter | None]]) -> tuple[list[int], list[str], list[int]]:
    """How many parameters each table has, their names, and which objects they are. Every step asks this: three lists of
    the whole model are made and compared without a look at each parameter in Python."""
    objects = chain.from_iterable(table.values() for table in tables)
    names = chain.from_iterable(
        table.keys() for table in tables
    )  # those of torch.jit are no dicts, and know their keys
    return [*map(len, tables)], [*names], [*map(id, objects)]


def _alike(p: Tensor, before: Tensor) -> bool:
    """Whether a parameter can stand in the place of another."""
    if isinstance(p, DTensor) and isinstance(before, DTensor):
        layouts = p.device_mesh == before.device_mesh and p.placements == before.placements
        return layouts and held_of(p).shape == held_of(before).shape
    return type(p) is type(before) and p.shape == before.shape and p.device == before.device


__all__ = ["Placed"]
