"""``PlacedModel``: the parameters, classes and forwards of a model when the job was made; finds what has changed since.

A person may write to parameters between steps (``p.mul_``, ``p.data = …``, ``load_state_dict``). But some changes would be
lost without an error, so ``check`` finds them:

    a parameter is replaced        FSDP2 goes on with its own; nobody reduces the gradient of a new one
    a parameter is removed         ranks would wait for it when they compare or save
    a module's class is changed    its calls are wrapped, and go to the old class's forward
    a module's forward is changed  in a model in parts: stages and branches run the recorded parts of the old one
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.errors import Finding, Findings
from meshwright.private import any_backward_hooks, raw_local, raw_locals
from meshwright.recipe import Recipe
from meshwright.runtime.weights.fsdp import follow_memory, needs_fsdp
from meshwright.runtime.weights.parameters import own_gradient, parameter_slots, removed


class PlacedModel:
    """The parameters that a job put into its model, and the classes and forwards of its modules at that time.

    Args:
        model: the model, with sharded parameters, between steps.

    Attributes:
        token: it stays the same object as long as the parameters, their local tensors and their ``requires_grad`` are
            unchanged, so that facts about them may be cached. None if FSDP2 replaces parameters during a forward.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self._model, self._recipe, self._by_fsdp = model, recipe, needs_fsdp(recipe)
        self.token: object | None = None
        self._note()

    def _note(self) -> None:
        """Takes the model's current parameters, classes and forwards as the reference for later checks."""
        self._all_modules = modules = list(self._model.modules())
        self._classes = [*map(type, modules)]
        self._forwards = self._forwards_now()
        self._children = [m._modules for m in modules]
        self._children_then = [dict(children) for children in self._children]
        self._tables = [m._parameters for m in modules]
        self._tables_then = _contents(self._tables)
        by_id = {id(p): p for table in self._tables for p in table.values() if p is not None}
        self._dtensors = [p for p in by_id.values() if isinstance(p, DTensor)]
        self._known, self._tables_by_id = by_id, {id(table): dict(table) for table in self._tables}
        self._note_local_tensors()

    def _note_local_tensors(self) -> None:
        self._locals_then, self._trains = raw_locals(self._dtensors), [*map(_TRAINS, self._dtensors)]
        self.token = None if self._by_fsdp else object()
        if self._by_fsdp:
            follow_memory(self._model)

    def check(self) -> None:
        """Called between steps, when no unit is gathered.

        Raises:
            PlanError: with every parameter that was replaced or removed, and every module whose class or forward was changed.
        """
        same_parameters = self._children == self._children_then and _contents(self._tables) == self._tables_then
        if (
            same_parameters
            and [*map(type, self._all_modules)] == self._classes
            and all(map(is_, self._forwards_now(), self._forwards))
        ):
            if not self._has_same_local_tensors():
                self._note_local_tensors()
            return
        findings = Findings("this step")
        for name, module, key, p in parameter_slots(self._model):
            before = self._tables_by_id.get(id(module._parameters), {}).get(key)
            if (finding := self._finding(name, before, p)) is not None:
                findings.extend([finding])
        names = {name for name, *_ in parameter_slots(self._model)}
        findings.extend([removed(line) for line in self._recipe.parameters if line.name not in names])
        classes = {id(m): cls for m, cls in zip(self._all_modules, self._classes, strict=True)}
        for name, module in self._model.named_modules():
            if (cls := classes.get(id(module), type(module))) is not type(module):
                findings.extend([_of_another_class(name, cls, type(module))])
        forwards = {id(m): forward for m, forward in zip(self._all_modules, self._forwards, strict=False)}
        for name, module in self._model.named_modules():
            if id(module) in forwards and vars(module).get("forward") is not forwards[id(module)]:
                findings.extend([_of_another_forward(name)])
        findings.raise_if_any()
        self._note()

    def divide_gradients(self) -> None:
        """Divides gradients that a person's own backward has left otherwise as the parameters are. Collective, if there are
        any."""
        for p in self._dtensors:
            if p.grad is not None:
                own_gradient(p)

    def _forwards_now(self) -> list[object]:
        """The ``forward`` attribute of each module itself, which hides the class's; only for a model in parts."""
        return [vars(m).get("forward") for m in self._all_modules] if self._recipe.in_parts else []

    def have_backward_hooks(self) -> bool:
        """Whether modules have hooks that run in a backward."""
        return any_backward_hooks(self._all_modules)

    def _has_same_local_tensors(self) -> bool:
        """Whether local tensors, and which parameters are trained, are as at the last check."""
        same_tensors = map(is_, raw_locals(self._dtensors), self._locals_then)
        return all(same_tensors) and [*map(_TRAINS, self._dtensors)] == self._trains

    def _finding(self, name: str, before: Tensor | None, p: Tensor) -> Finding | None:
        """A finding if a parameter is not the one that the job put there.

        Args:
            before: the parameter that the job put there; None if there was none.
        """
        line = self._recipe.by_name.get(name)
        if line is None:
            return Finding(
                where=name,
                given="a parameter that was not there when the job was made",
                required="the parameters that were planned: nobody shards it, or reduces its gradient",
                fix="put it into the model before parallelize",
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
    """(number of parameters in each table, their names, ids of their objects). Every step compares these three lists, which
    needs no Python code for each parameter."""
    objects = chain.from_iterable(table.values() for table in tables)
    # (``keys()``, since tables of torch.jit are no dicts.)
    names = chain.from_iterable(table.keys() for table in tables)
    return [*map(len, tables)], [*names], [*map(id, objects)]


def _alike(p: Tensor, before: Tensor) -> bool:
    """Whether a parameter has the same type, layout, shape and device as another, so that it can replace it."""
    if isinstance(p, DTensor) and isinstance(before, DTensor):
        layouts = p.device_mesh == before.device_mesh and p.placements == before.placements
        return layouts and raw_local(p).shape == raw_local(before).shape
    return type(p) is type(before) and p.shape == before.shape and p.device == before.device


__all__ = ["PlacedModel"]
