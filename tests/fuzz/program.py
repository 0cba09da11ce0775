"""A random small program: classes of modules, made of statements. All of it is data: frozen, comparable, printable.

    Case        a program, the plan that it runs under, the rows of each backward of each optimizer step
    Program     classes; the last one is the model
    Class       what __init__ sets up (members), and the statements of forward
    Statement   one line of a forward, or a region (`with torch.no_grad():`) with statements within

`source` prints a case as Python that a person can paste and run; the judge runs exactly this text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Statement:
    """``out = text``, with the names ``of`` in the places ``{0}``, ``{1}``, ... of the text.

    Attributes:
        out: the name that the value gets; None if the line is no assignment.
        within: the statements of a region, whose head is ``text``.
    """

    out: str | None
    text: str
    of: tuple[str, ...] = ()
    within: tuple[Statement, ...] = ()

    def lines(self, indent: str = "") -> Iterator[str]:
        code = re.sub(r"\{(\d)\}", lambda m: self.of[int(m.group(1))], self.text)
        yield f"{indent}{self.out} = {code}" if self.out else f"{indent}{code}"
        for statement in self.within:
            yield from statement.lines(indent + "    ")

    def code(self) -> str:
        return "\n".join(self.lines())

    def __len__(self) -> int:
        """Lines that compute something."""
        return sum(map(len, self.within)) or 1


@dataclass(frozen=True)
class Member:
    """A line of ``__init__``: what it sets, and the line."""

    name: str
    text: str


@dataclass(frozen=True)
class Class:
    """A module: ``result`` is the expression that ``forward`` returns."""

    name: str
    inputs: tuple[str, ...]
    members: tuple[Member, ...]
    body: tuple[Statement, ...]
    result: str

    def source(self) -> str:
        used = "\n".join([*(line for s in self.body for line in s.lines()), self.result])
        # What a used member mentions is used, too: a parameter that a function is closed over.
        for m in reversed(self.members):
            used += f"\n{m.text.partition('=')[2]}" if m.name and re.search(rf"\bself\.{m.name}\b", used) else ""
        kept = [m for m in self.members if m.name == "" or re.search(rf"\bself\.{m.name}\b", used)]
        names = {m.name for m in kept}
        # A member that stands for itself (name "") goes with those that it mentions.
        kept = [m for m in kept if m.name or set(re.findall(r"\bself\.(\w+)", m.text)) - {"register_buffer"} <= names]
        lines = [f"class {self.name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {m.text}" for m in kept]
        inputs = [*self.inputs, *(["carried"] if "carried" in used else [])]
        lines += ["", f"    def forward({', '.join(['self', *inputs])}):"]
        lines += [line for s in self.body for line in s.lines("        ")]
        return "\n".join([*lines, f"        return {self.result}"])


@dataclass(frozen=True)
class Given:
    """A class that programs use as it is: a function of autograd's, a type of what modules return."""

    name: str
    text: str
    inputs: tuple[str, ...] = ()
    members: tuple[Member, ...] = ()
    body: tuple[Statement, ...] = ()
    result: str = ""

    def source(self) -> str:
        return self.text


@dataclass(frozen=True)
class Program:
    """Classes, the model last. ``kinds``: of its statements, by the names of the grammar's switches."""

    classes: tuple[Class | Given, ...]
    tokens: int = 4
    width: int = 8
    kinds: frozenset[str] = frozenset()

    def source(self) -> str:
        model = self.classes[-1].source()
        needed, text = [], model
        for made in reversed(self.classes[:-1]):
            if re.search(rf"\b{made.name}\b", text):
                needed.append(made.source())
                text += needed[-1]
        return "\n\n\n".join([*reversed(needed), model])

    def __len__(self) -> int:
        source = self.source()
        return sum(len(s) for c in self.classes if f"class {c.name}(" in source for s in c.body)


@dataclass(frozen=True)
class Run:
    """What the judge takes: a text that makes ``Model``, and how it is run.

    Attributes:
        source: Python, in which torch, nn, F and checkpoint are known.
        plan: as plain values.
        rows: for each optimizer step the rows of each of its backwards.
        precise: whether all is computed in float64; if not, only what is grossly different is wrong.
        lengths: so many lengths, from ``tokens`` on, batches have in turn.
        training: what `model.train` is called with.
    """

    source: str
    plan: Mapping[str, Any]
    rows: tuple[tuple[int, ...], ...] = ((4,), (4,))
    tokens: int = 4
    width: int = 8
    precise: bool = True
    lengths: int = 1

    def printed(self) -> str:
        """As a file of tests/fuzz/kept."""
        head = [
            "from dataclasses import dataclass",
            "from functools import partial",
            "from typing import Any, NamedTuple",
            "",
            "import torch",
            "import torch.nn.functional as F",
            "from torch import nn",
            "from torch.utils.checkpoint import checkpoint",
            "",
        ]
        facts = [f"PLAN = {dict(self.plan)!r}", f"ROWS = {self.rows!r}", f"TOKENS, WIDTH = {self.tokens}, {self.width}"]
        facts += [] if self.precise else ["PRECISE = False"]
        facts += [] if self.lengths == 1 else [f"LENGTHS = {self.lengths}"]
        return "\n".join([*head, *facts, "", "", self.source, ""])


def read(text: str) -> Run:
    """The run that a file of tests/fuzz/kept describes; the inverse of ``Run.printed``."""
    facts: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            names = [n.id for n in ast.walk(target) if isinstance(n, ast.Name)]
            values = ast.literal_eval(node.value)
            facts.update(zip(names, values, strict=True) if isinstance(target, ast.Tuple) else [(names[0], values)])
    found = re.search(r"^(@dataclass|class )", text, re.MULTILINE)
    assert found is not None
    start = found.start()
    return Run(
        text[start:].rstrip(),
        facts["PLAN"],
        facts["ROWS"],
        facts["TOKENS"],
        facts["WIDTH"],
        facts.get("PRECISE", True),
        facts.get("LENGTHS", 1),
    )


@dataclass(frozen=True)
class Case:
    """A program and how it is run."""

    program: Program
    plan: Mapping[str, Any]
    rows: tuple[tuple[int, ...], ...] = ((4,), (4,))
    layout: str = field(default="", compare=False)
    lengths: int = 1

    @property
    def run(self) -> Run:
        p = self.program
        return Run(p.source(), self.plan, self.rows, p.tokens, p.width, "half" not in p.kinds, self.lengths)

    def with_model(self, **changes: Any) -> Case:
        """This case, its last class changed."""
        classes = self.program.classes
        return replace(self, program=replace(self.program, classes=(*classes[:-1], replace(classes[-1], **changes))))
