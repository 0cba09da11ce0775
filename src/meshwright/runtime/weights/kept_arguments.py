"""``KeptArguments``: the arguments of a call as they were before it, for a second run of the call.

    before the first run   a tree: a node for each container and plain object, a leaf for each tensor
    before a second run    containers and objects are built from the tree, for this run alone, which may write to them

Nobody writes to a tree. So the tree of a call shares nodes with that of an earlier call, where nothing has changed in between.
All blocks of a decoder get one cache, to which each adds its keys. Without sharing, block k would copy what k blocks added.

    blocks.1   cache ─ [keys of 0, -, -]
                             │            the same node
    blocks.2   cache ─ [keys of 0, keys of 1, -]
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Container
from enum import Enum, auto
from itertools import chain, repeat
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from meshwright.calls.placeholder import Placeholder
from meshwright.calls.structure import PLAIN, attributes_in, is_copied_by_python, is_plain_object, tensors_of
from meshwright.private import memory_facts, pytree, version, without_modes
from meshwright.spmd.tensor import local_of

_DEPTH = 6  # how many plain objects to look into, one within the other


class Leaf:
    """A tensor among the arguments.

    Attributes:
        value: the tensor for the second run: in the same memory, without a graph; or a copy, if the call writes to it.
        copied: whether it is a copy.
    """

    __slots__ = ("_facts", "_source", "_version", "copied", "value")

    def __init__(self, source: Tensor) -> None:
        # Not the tensor itself: a call that writes to it makes its graph part of the call's own, which holds this leaf.
        self._source, self._facts = ref(source), _facts_of(source)
        self.value: Tensor
        self.copied = False
        self._version: int | None

    def keep(self, source: Tensor, *, copied: bool) -> None:
        self.value, self.copied = as_input(source, copied), copied
        self._version = version(local_of(self.value))

    def is_of(self, t: Tensor) -> bool:
        """Whether a new leaf for ``t`` would keep the same."""
        return not self.copied and self._source() is t and self.has_facts_of(t) is True

    def has_facts_of(self, t: Tensor) -> bool | None:
        """Whether a tensor lies where this one lay, and has been written as often; None if that is unknown."""
        return None if self._facts is None else _facts_of(t) == self._facts

    def is_unwritten(self) -> bool:
        """Whether ``value`` is still what it was before the call."""
        return version(local_of(self.value)) == self._version


def _facts_of(t: Tensor) -> Any:
    """All that can change of a plain tensor while it stays the same object; None for another one."""
    if type(t) is not Tensor:
        return None
    with without_modes():
        return memory_facts(t)


def as_input(t: Tensor, copied: bool) -> Tensor:
    """A tensor detached from its graph. ``copied``: whether to copy it, so that a run may write to it."""
    if isinstance(t, (nn.Parameter, Placeholder)):  # a placeholder has no values: the block only passes it on
        return t
    value = t.detach()
    if t.requires_grad:
        value.requires_grad_()
    return value.clone() if copied else value  # (a clone is no leaf; autograd refuses writes to a leaf)


class KeptArguments:
    """The arguments of a call as they were before it.

    Attributes:
        root: the tree.
        leaves: one for each tensor, in the order in which they were found.
    """

    def __init__(self, root: Any, leaves: list[Leaf]) -> None:
        self.root, self.leaves = root, leaves

    @classmethod
    def of(
        cls, arguments: Any, before: KeptArguments | None, copied: Callable[[int], Collection[int]]
    ) -> tuple[KeptArguments, list[Tensor]]:
        """Keeps the arguments of a call that is about to run.

        Args:
            arguments: (args, kwargs).
            before: those of an earlier call, with which unchanged parts are shared.
            copied: number of tensors among the arguments → indices of those to which the call may write.

        Returns:
            (what is kept, the tensors among the arguments).
        """
        walk = _Walk(arguments, before)
        of_copies = copied(len(walk.leaves))
        if any(walk.leaves[i] not in walk.new for i in of_copies):  # a copy is for one call
            walk = _Walk(arguments, None)
        for i, (leaf, t) in enumerate(zip(walk.leaves, walk.tensors, strict=True)):
            if leaf in walk.new:
                leaf.keep(t, copied=i in of_copies)
        for node in walk.templates:
            node.detach_template()
        return cls(walk.root, walk.leaves), walk.tensors

    def is_unwritten(self) -> bool:
        """Whether the kept tensors are still what they were before the call."""
        with without_modes():
            return all(map(Leaf.is_unwritten, self.leaves))

    def drop_copies(self, indices: Collection[int], tensors: list[Tensor]) -> None:
        """The call has run, and has not written to these tensors: copies of them are not needed."""
        for i in indices:
            if self.leaves[i].has_facts_of(tensors[i]) is not False:
                self.leaves[i].keep(tensors[i], copied=False)

    def again(self, written: Container[int]) -> Any:
        """The arguments for a second run. ``written``: indices of the tensors to which it may write."""
        built: dict[Any, Any] = {leaf: as_input(leaf.value, i in written) for i, leaf in enumerate(self.leaves)}
        return _build(self.root, built) if isinstance(self.root, _Node) else self.root


class _Form(Enum):
    """How a container or object is taken apart, and built again."""

    SEQUENCE = auto()  # a list or tuple
    NAMED_TUPLE = auto()
    MAPPING = auto()  # a dict
    OBJECT = auto()  # a plain object that is nothing but its attributes
    COPIED = auto()  # another plain object: its class decides how it is copied
    REGISTERED = auto()  # another container that pytree knows
    CODE = auto()  # a function, class or module
    OTHER = auto()  # no second run gets a copy, as it is unknown how to make one


def _form_of(value: Any) -> _Form:
    kind = type(value)
    if kind is tuple or kind is list:
        return _Form.SEQUENCE
    if kind is dict:
        return _Form.MAPPING
    if pytree.is_namedtuple_instance(value):
        return _Form.NAMED_TUPLE
    if kind in pytree.SUPPORTED_NODES:
        return _Form.REGISTERED
    if is_plain_object(value):
        return _Form.OBJECT if is_copied_by_python(value) else _Form.COPIED
    is_code = isinstance(value, (type, nn.Module, FunctionType, BuiltinFunctionType))
    return _Form.CODE if is_code else _Form.OTHER


_OBJECTS = _Form.OBJECT, _Form.COPIED
_NAMED = _Form.MAPPING, *_OBJECTS  # those whose items are stored by name


class _Node:
    """A container or object.

    Attributes:
        keys: of its items; for ``REGISTERED`` pytree's context; None for a sequence.
        items: nodes, leaves and other values.
        inner: (key or index, node or leaf) for each item that is one.
        template: of ``COPIED``: a copy of the object, from which more are copied.
    """

    __slots__ = ("form", "inner", "items", "keys", "kind", "template")

    def __init__(self, kind: type, form: _Form) -> None:
        self.kind, self.form = kind, form
        self.template: Any = None

    def fill(self, keys: Any, items: list[Any]) -> None:
        self.keys, self.items = keys, items
        names = keys if self.form in _NAMED else range(len(items))
        self.inner = [(n, x) for n, x in zip(names, items, strict=True) if type(x) is Leaf or type(x) is _Node]

    def has(self, keys: Any, items: list[Any]) -> bool:
        """Whether a new node with these keys and items would be equal. (Contexts and templates are not compared.)"""
        if self.form is _Form.COPIED or self.form is _Form.REGISTERED or len(items) != len(self.items):
            return False
        return all(map(is_, items, self.items)) and (keys is None or all(map(is_, keys, self.keys)))

    def detach_template(self) -> None:
        """Replaces what the object itself holds: a template may neither change with the object, nor hold graphs."""
        built: dict[Any, Any] = {}
        attributes = attributes_in(self.template)
        for name, item in self.inner:
            attributes[name] = _build(item, built)


class _Walk:
    """Makes the tree of arguments.

    Attributes:
        leaves, tensors: one of each for each tensor; new: the leaves that are not shared.
        templates: the nodes that have one.
    """

    def __init__(self, arguments: Any, before: KeptArguments | None) -> None:
        self.leaves: list[Leaf] = []
        self.tensors: list[Tensor] = []
        self.new: set[Leaf] = set()
        self.templates: list[_Node] = []
        self._forms: dict[type, _Form] = {}
        self._made: dict[int, Any] = {}  # id of a container, object or tensor → its node or leaf; None: in the making
        self._taken: set[Any] = set()  # nodes and leaves of this tree: each stands for one object
        self._alive: list[Any] = []  # what pytree makes of containers: else other objects could get their ids
        self.root = self._part(arguments, None if before is None else before.root, _DEPTH)

    def _part(self, value: Any, before: Any, depth: int) -> Any:
        """The node or leaf of a value, or the value if it needs none. ``before``: what stood there in the earlier tree."""
        if isinstance(value, Tensor):
            return self._leaf(value, before)
        kind = type(value)
        form = self._forms.get(kind)
        if form is None:
            form = self._forms[kind] = _form_of(value)
        if form is _Form.CODE:
            return value
        if form is _Form.OTHER or (not depth and form in _OBJECTS):
            return self._other(value)
        key = id(value)
        if key in self._made:
            if self._made[key] is None:  # it holds itself
                self._made[key] = _Node(kind, form)
            return self._made[key]
        return self._node(value, form, before, depth - (form in _OBJECTS))

    def _node(self, value: Any, form: _Form, before: Any, depth: int) -> Any:
        template = None
        if form is _Form.COPIED:
            try:
                template = copy.copy(value)
            except Exception:  # an object may raise anything if it is copied
                template = value
            if template is value:
                return self._other(value)
        self._made[id(value)] = None
        keys, items = self._apart(value if template is None else template, form)
        similar = type(before) is _Node and before.kind is type(value)
        hints = chain(before.items, repeat(None)) if similar else repeat(None)
        parts = [x if type(x) in PLAIN else self._part(x, hint, depth) for x, hint in zip(items, hints, strict=False)]
        node = self._made[id(value)]
        if node is None and similar and before not in self._taken and before.has(keys, parts):
            node = before
        else:
            node = node or _Node(type(value), form)
            node.fill(keys, parts)
        if template is not None:
            node.template = template
            self.templates.append(node)
        self._made[id(value)] = node
        self._taken.add(node)
        return node

    def _apart(self, value: Any, form: _Form) -> tuple[Any, list[Any]]:
        """(keys, items) of a container or object."""
        if form is _Form.SEQUENCE or form is _Form.NAMED_TUPLE:
            return None, list(value)
        if form is _Form.REGISTERED:
            items, context = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
            self._alive.append(items)
            return context, list(items)
        table = value if form is _Form.MAPPING else attributes_in(value)
        return list(table), list(table.values())

    def _leaf(self, t: Tensor, before: Any) -> Leaf:
        leaf: Leaf | None = self._made.get(id(t))
        if leaf is None:
            if type(before) is Leaf and before not in self._taken and before.is_of(t):
                leaf = before
            else:
                leaf = Leaf(t)
                self.new.add(leaf)
            self._made[id(t)] = leaf
            self._taken.add(leaf)
            self.leaves.append(leaf)
            self.tensors.append(t)
        return leaf

    def _other(self, value: Any) -> Any:
        """Notes the tensors in an object that is not copied: a write to them is noticed."""
        for t in tensors_of(value):
            self._leaf(t, None)
        return value


def _build(part: Any, built: dict[Any, Any]) -> Any:
    """The container or object of a node, or the tensor of a leaf. ``built``: those that have been built."""
    value = built.get(part)
    if value is not None:
        return value
    if type(part) is Leaf:
        value = built[part] = part.value
        return value
    form = part.form
    if form is _Form.OBJECT or form is _Form.MAPPING:
        value = object.__new__(part.kind) if form is _Form.OBJECT else {}
        table = vars(value) if form is _Form.OBJECT else value
        table.update(zip(part.keys, part.items, strict=True))
    elif form is _Form.COPIED:
        value = copy.copy(part.template)
        table = attributes_in(value)
    else:
        value = table = list(part.items)
    if part.kind is list or form in _NAMED:
        built[part] = value  # before its items, which may hold it
    for name, item in part.inner:
        table[name] = _build(item, built)
    if part.kind is tuple:
        value = tuple(value)
    elif form is _Form.NAMED_TUPLE:
        value = part.kind(*value)
    elif form is _Form.REGISTERED:
        value = pytree.SUPPORTED_NODES[part.kind].unflatten_fn(value, part.keys)
    built[part] = value
    return value
