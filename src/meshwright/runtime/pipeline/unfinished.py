"""What a stage leaves half done: it stops within the forward, before the model resets what it has set for this forward alone.

def forward(self, x):
    self.mask = x > 0           set on every stage
    for block in self.blocks:   a stage stops in here
        x = block(x)
    self.mask = None            so this is not reached, and the next forward would find the old mask
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from meshwright.calls.stage import StageProgram
from meshwright.calls.structure import attributes_in, buffers_in, owner_of
from meshwright.calls.tracer import slot_value
from meshwright.graph import ModelGraph
from meshwright.runtime.module_state import Contents, content_of, hook_tables, replace


@contextmanager
def unfinished_undone(model: nn.Module, program: StageProgram) -> Iterator[None]:
    """A context for a forward of one stage. Afterwards, attributes and forward hooks of modules are as before, if a whole
    forward leaves them as they were.

    The first forward of a program looks at all of them; later ones look at those that it has left changed.
    """
    if program.last:
        yield
        return
    holders = [holder for holder, _ in Contents(model).items] if program.unfinished is None else program.unfinished
    # (The attributes of an object with slots are a view that is made for each look.)
    before = [(holder, content_of(holder)) for holder in holders if isinstance(holder, (dict, list, set, deque))]
    ended = False
    try:
        yield
        ended = True
    finally:
        lasting = _lasting(model, program.graph) if before else {}
        undone = [h for h, content in before if replace(h, content, lasting.get(id(h), frozenset()))]
        if program.unfinished is None and ended:
            program.unfinished = undone


def _lasting(model: nn.Module, graph: ModelGraph) -> dict[int, frozenset[str] | None]:
    """What a whole forward changes: id of a table of attributes or buffers → their names. None: the whole container."""
    names: dict[int, set[str]] = {}
    lasting: dict[int, frozenset[str] | None] = {}
    for path, name in graph.changed:
        if (owned := owner_of(model.get_submodule(path), name)) is not None:
            owner, key = owned
            tables = (vars(owner), buffers_in(owner)) if isinstance(owner, nn.Module) else (attributes_in(owner),)
            for table in tables:
                names.setdefault(id(table), set()).add(key)
        lasting[id(slot_value(model, (path, name)))] = None
    if graph.changes_hooks:
        lasting |= {id(table): None for table in hook_tables(model)}
    return {**{table: frozenset(keys) for table, keys in names.items()}, **lasting}
