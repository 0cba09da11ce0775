"""The plan: what a person writes. Short; only the mesh is required, the rest is decided where left out.

    mesh: {dp_shard: 2, tp: 2}
    recompute: blocks
    modules:                                   # by glob, of a module's or a parameter's name
      "*.c_attn": {tp: column, parts: 3}
      encoder.norm: {dp: replicate}

A plan comes from Python, a dict or YAML, and goes back to YAML. However it comes, one pass reads it and
reports every problem at once, with the line and column where there are lines:

    text ──compose──► Source (plain values, and the place of each) ──read──► Plan, or one PlanError

    entry       what is said of one glob's modules or parameters
    keys        the keys, and what each takes
    meshes      the meshes that a plan may be laid over: one, several in order, or ``auto``
    source      plain values, and where each stands
    text        YAML, read into a source
    settings    ``key=value``, put into a source
    reader      one pass over a source: a plan's fields, or findings
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from inspect import signature
from pathlib import Path
from typing import Any, TypeAlias

from meshwright.errors import Findings
from meshwright.mesh import Mesh
from meshwright.plan.entry import Entries, Entry
from meshwright.plan.keys import DRAWN, FOUND, KEYS, PLAN
from meshwright.plan.meshes import AUTO, MeshesLike, chosen, in_order
from meshwright.plan.reader import Reader
from meshwright.plan.settings import put_setting
from meshwright.plan.source import MESH, Source
from meshwright.plan.text import compose, read_file, written

__all__ = ["KEYS", "Entries", "Entry", "Plan", "PlanLike"]


@dataclass(frozen=True, init=False)
class Plan:
    """How a model is to be laid out over a mesh, as far as a person cares to say.

    Args:
        mesh: the axes and their sizes, outermost first: ``{"fsdp": 2, "tp": 2}`` or ``"fsdp=2,tp=2"``. Several, in a list:
            the first that has as many ranks as there are processes (so a run goes on when a machine is gone). ``mesh`` is
            then the first of them, until ``at`` has chosen. ``auto``: the fastest that is found for the processes that there
            are (``find_plans``), with what the plan leaves out of sequence_parallel, recompute, microbatches, schedule,
            stages_per_rank and reshard_after_forward; ``mesh`` is then one device, until one is found.
        modules: for each glob an `Entry`, or a dict of its keys. Where several globs match, the later
            wins, key by key.
        parameters: another place to write entries of ``modules``; they come after those.
        sequence_parallel: keep activations between tensor-parallel regions cut along the sequence; left out: false.
        recompute: ``blocks`` computes every repeated block again in backward; ``none`` keeps all activations; left out: none.
        microbatches: into how many pieces a step divides its rows, whose gradients add up; left out: 1, and with a
            pipeline twice as many as it has ranks, or as many as there are rows.
        schedule: of a pipeline: ``1f1b``, ``gpipe``, ``interleaved`` (1F1B with several stages a rank), ``zero_bubble``;
            left out: 1f1b. Without effect, which is noted, on a mesh without a pipeline.
        stages_per_rank: of a pipeline; left out: 2 for ``interleaved``, else 1.
        precision: ``float32``; ``bfloat16``: computes in it, and keeps parameters and reductions in float32;
            ``float64``: everything in it.
        reshard_after_forward: free a gathered FSDP unit after its forward; its backward gathers it again. Left out: true, and
            with a pipeline false, which would gather it for each microbatch.
        rows: ``split``: data ranks and microbatches each see their own rows of a batch, whatever the model makes of it;
            ``whole``: every data rank runs all rows; ``auto``: split, unless the model's loss couples rows (statistics
            of the batch, losses that compare rows), which is tried out before the first step.
        branches: ``auto``: what can run at the same time is found in the forward, and placed on slices of tp; ``said``: only
            what ``on`` places.
        seed: of the initial values and of dropout.
        nonfinite: what training does where the loss or a gradient is nan or infinite: ``stop``, with an error; ``skip``
            leaves out the optimizer's step and counts it.
        verify: after how many steps ranks compare the values that they should hold alike, bit for bit; the first step compares
            as well. 0: never.
        eager: over tp, run each torch function through the dispatcher in every step. Left out: false, blocks are recorded, and
            run as programs of local functions and collectives, which give the same and take the host less time.
        compile: over tp, hand the program of each kind of block to ``torch.compile``. Left out: false. The first steps then
            take some ten seconds a kind; a block that has no program, or one that cannot be compiled, runs as without, and
            ``job.notes`` says why.
        weights: what parameters begin with. ``drawn``: what the model draws when it is made; all of it is drawn on every rank,
            which takes minutes for billions. Nothing is drawn for ``checkpoint`` and ``pretrained``, whose values
            ``job.load`` and ``job.load_pretrained`` bring, and for ``none``: they are not numbers (nan) until they are filled.

    Attributes:
        meshes: what it may be laid over, in order; empty for ``auto``.
        said: settings that a person gave, of those that are found with a mesh.

    Raises:
        PlanError: with every problem of the arguments.

    Example:
        >>> plan = Plan({"fsdp": 2, "tp": 2}, {"*.c_attn": {"tp": "column", "parts": 3}})
        >>> print(plan.dump(), end="")
        mesh: {dp_shard: 2, tp: 2}
        modules:
          '*.c_attn': {tp: column, parts: 3}
    """

    mesh: Mesh
    meshes: tuple[Mesh, ...]
    modules: Entries
    sequence_parallel: bool
    recompute: str
    microbatches: int | None
    schedule: str
    stages_per_rank: int | None
    precision: str
    reshard_after_forward: bool | None
    rows: str
    branches: str
    seed: int
    nonfinite: str
    verify: int
    eager: bool
    compile: bool
    weights: str
    said: frozenset[str] = field(compare=False, repr=False)

    def __init__(
        self,
        mesh: MeshesLike,
        modules: Mapping[str, Entry | Mapping[str, object]] | None = None,
        *,
        parameters: Mapping[str, Entry | Mapping[str, object]] | None = None,
        sequence_parallel: bool | None = None,
        recompute: str | None = None,
        microbatches: int | None = None,
        schedule: str | None = None,
        stages_per_rank: int | None = None,
        precision: str = "float32",
        reshard_after_forward: bool | None = None,
        rows: str = "auto",
        branches: str = "said",
        seed: int = 0,
        nonfinite: str = "stop",
        verify: int = 100,
        eager: bool = False,
        compile: bool = False,
        weights: str = DRAWN,
    ) -> None:
        values = dict(locals())  # the arguments, by their names
        del values["self"]
        given = Reader(Source(values)).plan()
        fields, meshes = _DEFAULTS | given, in_order(given["mesh"])
        fields |= {"mesh": meshes[0] if meshes else _ALONE, "meshes": meshes, "said": frozenset(given) & {*FOUND}}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def at(self, processes: int) -> Plan:
        """This plan with the mesh chosen for so many processes: the first of its meshes that has as many ranks.

        Raises PlanError if none has, with all of them. A plan of one mesh is given back as it is, whatever its size:
        who starts it says what is missing. A plan with ``mesh: auto`` stays so for more than one process: a search finds
        its mesh.
        """
        if len(self.meshes) == 1 or (self.auto and processes > 1):
            return self
        return self.replace(mesh=chosen(self.meshes, processes))

    @property
    def auto(self) -> bool:
        """Whether its mesh is still to be found."""
        return not self.meshes

    def check_mesh(self) -> None:
        """Raises PlanError if the mesh is still to be found: for what needs one, and knows no number of processes."""
        findings = Findings()
        if self.auto:
            findings.add(
                where="mesh",
                given=AUTO,
                required="a mesh: it is not known here how many processes there will be",
                fix="mw.find_plans(build, batch, devices=8).plans[0].plan",
            )
        findings.raise_if_any()

    @property
    def pieces(self) -> int:
        """Into how many microbatches a data rank's rows are divided, where there are as many rows."""
        pipeline = self.mesh.axis_size("pp")
        return self.microbatches or (2 * pipeline if pipeline > 1 else 1)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan in a YAML file. Raises PlanError with every problem, each with ``file:line:column``."""
        return cls(**Reader(read_file(os.fspath(path))).plan())

    @classmethod
    def from_yaml(cls, text: str, name: str = "plan") -> Plan:
        """The plan in a YAML text; errors call it ``name``. Raises PlanError with every problem."""
        return cls(**Reader(compose(text, name)).plan())

    @classmethod
    def from_dict(cls, settings: Mapping[str, object]) -> Plan:
        """The plan in plain values, as YAML would give them. Raises PlanError with every problem."""
        return cls(**Reader(Source(settings)).plan())

    @classmethod
    def parse(cls, spec: PlanLike) -> Plan:
        """A plan from whatever stands for one.

        A plan; a mesh; a dict; the path of a YAML file; or text: YAML (if it has a line break or ``": "``), a
        mesh (``"dp_shard=2,tp=2"``), ``auto``, else a path. Raises PlanError with every problem.
        """
        if isinstance(spec, Plan):
            return spec
        if isinstance(spec, Mesh):
            return cls(spec)
        if isinstance(spec, Mapping):
            return cls.from_dict(spec)
        text = os.fspath(spec)
        if text == AUTO:
            return cls(AUTO)
        if isinstance(spec, str) and not text.endswith((".yaml", ".yml")):
            if "\n" in text or ": " in text:
                return cls.from_yaml(text)
            if "=" in text:
                return cls(text)
        return cls.load(text)

    @classmethod
    def from_command(cls, path: str | None = None, mesh: str | None = None, settings: Iterable[str] = ()) -> Plan:
        """The plan that a command line says: a file, the mesh over its own, settings over both.

        Raises PlanError with every problem of all three.

        >>> Plan.from_command(mesh="dp_shard=2,tp=2", settings=["mesh.tp=4", "recompute=blocks"]).settings()
        {'mesh': {'dp_shard': 2, 'tp': 4}, 'recompute': 'blocks'}
        """
        first = Source({}) if path is None else read_file(path)
        if mesh is not None:
            first.put("mesh", mesh, MESH)
        values = Reader(first).right()
        then = Source(values, first.findings)
        then.places[()] = MESH if path is None else first.where(())
        for setting in settings:
            put_setting(setting, values, then)
        return cls(**Reader(then).plan())

    def settings(self) -> dict[str, Any]:
        """The plan as plain YAML values, without its defaults. The inverse of `from_dict`."""
        meshes = [dict(mesh.axes) for mesh in self.meshes]
        said: dict[str, Any] = {"mesh": (meshes[0] if len(meshes) == 1 else meshes) if meshes else AUTO}
        kept = self.said if self.auto else ()  # what is said is not found, also if it is the default
        said |= {name: getattr(self, name) for name in PLAN if name in kept or getattr(self, name) != _DEFAULTS[name]}
        if self.modules:
            said["modules"] = {glob: entry.settings() for glob, entry in self.modules.items()}
        return said

    def dump(self, path: str | os.PathLike[str] | None = None) -> str:
        """The plan as YAML, also written to ``path`` where one is given. `load` gives an equal plan."""
        text = written(self.settings())
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.dump())}</pre>"

    def replace(self, **changes: Any) -> Plan:
        """This plan with some settings changed. Raises PlanError, also for a setting that plans lack."""
        return Plan.from_dict({**self.settings(), **changes})

    def with_settings(self, settings: Iterable[str]) -> Plan:
        """This plan with ``key=value`` settings, as the command line takes them; a later one wins.

        The key is dotted, ``recompute`` or ``mesh.tp`` or ``modules.<glob>.dp`` (a glob may have dots of its
        own); the value is YAML. An entry of ``modules`` that is set comes after all others, so that it wins.
        Raises PlanError with every problem of all settings.

        >>> Plan("tp=2").with_settings(["recompute=blocks", "modules.h.0.attn.tp=replicate"]).modules
        {'h.0.attn': Entry(dp=None, tp='replicate', parts=None, units=None, recompute=None, unit=None, on=None, mesh=None)}
        """
        values = self.settings()
        source = Source(values)
        for setting in settings:
            put_setting(setting, values, source)
        return Plan(**Reader(source).plan())


PlanLike: TypeAlias = Plan | Mesh | Mapping[str, Any] | str | os.PathLike[str]

_ALONE = Mesh((("dp_shard", 1),))
_DEFAULTS: dict[str, Any] = {name: signature(Plan).parameters[name].default for name in PLAN}
_DEFAULTS |= {"sequence_parallel": False, "recompute": "none", "schedule": "1f1b"}
