"""The plan: what a person writes. Only the mesh is required; Meshwright decides what is left out.

    mesh: {dp_shard: 2, tp: 2}
    recompute: blocks
    modules:                                   # globs of names of modules or parameters
      "*.c_attn": {tp: column, parts: 3}
      encoder.norm: {dp: replicate}

A plan comes from Python, a dict or YAML, and can be written as YAML. In each case one pass reads it and reports every problem
at once, with line and column if it comes from a text:

    text ──compose──► Source (plain values, and the position of each) ──read──► Plan, or one PlanError

    entry       the settings for the modules or parameters of one glob
    keys        the keys, and the values that each accepts
    meshes      the meshes of a plan: one, several in order of preference, or ``auto``
    source      plain values with their positions in a text
    text        YAML → a source
    settings    ``key=value`` → a source
    reader      one pass over a source: the fields of a plan, or findings
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
from meshwright.plan.keys import DRAWN, KEYS, PLAN, SEARCHED
from meshwright.plan.meshes import AUTO, MeshesLike, chosen, in_order
from meshwright.plan.reader import Reader
from meshwright.plan.settings import put_setting
from meshwright.plan.source import MESH, Source
from meshwright.plan.text import compose, read_file, written

__all__ = ["KEYS", "Entries", "Entry", "Plan", "PlanLike"]


@dataclass(frozen=True, init=False)
class Plan:
    """How a model is laid out over a mesh. What is left out, Meshwright decides.

    Args:
        mesh: the axes and their sizes, outermost first: ``{"fsdp": 2, "tp": 2}`` or ``"fsdp=2,tp=2"``. A list of several
            meshes: the first that has as many ranks as there are processes (so a run can resume with fewer machines); until
            ``at`` has chosen, ``mesh`` is the first of them. ``auto``: the fastest mesh that a search (``find_plans``) finds
            for the number of processes; the search also decides those of sequence_parallel, recompute, microbatches,
            schedule, stages_per_rank, reshard_after_forward and branches that the plan leaves out. Until then ``mesh`` is one
            device.
        modules: glob → an `Entry`, or a dict of its keys. If several globs match a name, the later one wins, key by key.
        parameters: more entries for ``modules``; they come after those.
        sequence_parallel: shard activations between tensor-parallel regions along the sequence. Default: false.
        recompute: ``blocks`` recomputes every repeated block in the backward; ``none`` keeps all activations. Default: none.
        microbatches: the number of pieces into which a step divides its rows; their gradients add up. Default: 1; with a
            pipeline twice its number of ranks, or the number of rows if that is smaller.
        schedule: the schedule of a pipeline: ``1f1b``, ``gpipe``, ``interleaved`` (1F1B with several stages a rank) or
            ``zero_bubble``. Default: 1f1b. Without a pipeline it has no effect, and a note says so.
        stages_per_rank: the number of pipeline stages on each rank. Default: 2 for ``interleaved``, else 1.
        precision: ``float32``; ``bfloat16``: computes in bfloat16, with parameters and reductions in float32;
            ``float64``: everything in float64.
        reshard_after_forward: free a gathered FSDP unit after its forward; its backward gathers it again. Default: true; with
            a pipeline false, because a unit would be gathered for each microbatch.
        rows: ``split``: data ranks and microbatches each run their own rows of a batch, whatever the model does with them;
            ``whole``: every data rank runs all rows; ``auto``: split, unless the model's loss couples rows (statistics
            of the batch, losses that compare rows), which a trial before the first step finds out.
        branches: ``auto``: modules that can run at the same time are found in the forward, and placed on slices of tp;
            ``said``: only the modules that ``on`` places. Default: said. With ``mesh: auto``, ``auto`` and no value place them
            where they pay.
        seed: the seed of initial values and of dropout.
        nonfinite: what training does if the loss or a gradient is nan or infinite: ``stop`` raises an error; ``skip``
            leaves out the optimizer's step and counts it.
        verify: ranks compare the values that should be equal on them, bit for bit, in the first step and then every so many
            steps. 0: never.
        eager: over tp, run each torch function through the dispatcher in every step. Default: false; then blocks are recorded
            and run as programs of local functions and collectives, with the same results and less time of the host.
        compile: over tp, compile the program of each kind of block with ``torch.compile``. Default: false. The first steps
            take some ten seconds more for each kind of block. A block without a program, or with one that cannot be compiled,
            runs uncompiled, and ``job.notes`` says why.
        weights: the initial values of parameters. ``drawn``: those that the model draws when it is built; every rank draws all
            of them, which takes minutes for billions of parameters. ``checkpoint``, ``pretrained``: nothing is drawn;
            ``job.load`` or ``job.load_pretrained`` brings the values. ``none``: nothing is drawn. Until parameters are
            filled they are nan.

    Attributes:
        meshes: the meshes of the plan, in order of preference; empty for ``auto``.
        said: the settings that the plan names, among those that a search decides otherwise.

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
        branches: str | None = None,
        seed: int = 0,
        nonfinite: str = "stop",
        verify: int = 100,
        eager: bool = False,
        compile: bool = False,
        weights: str = DRAWN,
    ) -> None:
        values = dict(locals())  # the arguments, by their names
        del values["self"]
        settings = Reader(Source(values)).plan()
        fields, meshes = _DEFAULTS | settings, in_order(settings["mesh"])
        fields |= {"mesh": meshes[0] if meshes else _ALONE, "meshes": meshes, "said": frozenset(settings) & {*SEARCHED}}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def at(self, processes: int) -> Plan:
        """This plan with one mesh: the first of its meshes that has as many ranks as there are processes.

        A plan with one mesh is returned unchanged, whatever its size. A plan with ``mesh: auto`` is returned unchanged if
        there are several processes, as a search must find the mesh.

        Raises:
            PlanError: none of several meshes has that many ranks.
        """
        if len(self.meshes) == 1 or (self.auto and processes > 1):
            return self
        return self.replace(mesh=chosen(self.meshes, processes))

    @property
    def auto(self) -> bool:
        """Whether a search must still find the mesh."""
        return not self.meshes

    def check_mesh(self) -> None:
        """Raises PlanError if the plan has no mesh yet, for a caller that does not know the number of processes."""
        findings = Findings()
        if self.auto:
            findings.add(
                where="mesh",
                given=AUTO,
                required="a mesh, as the number of processes is not known here",
                fix="mw.find_plans(build, batch, devices=8).plans[0].plan",
            )
        findings.raise_if_any()

    @property
    def pieces(self) -> int:
        """The number of microbatches into which a data rank divides its rows, if it has that many rows."""
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
        """The plan in plain values, as a YAML reader returns them. Raises PlanError with every problem."""
        return cls(**Reader(Source(settings)).plan())

    @classmethod
    def parse(cls, spec: PlanLike) -> Plan:
        """A plan from any of its forms.

        Args:
            spec: a plan; a mesh; a dict; the path of a YAML file; or a string: YAML (if it has a line break or ``": "``), a
                mesh (``"dp_shard=2,tp=2"``), ``auto``, else a path.

        Raises:
            PlanError: with every problem.
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
        """The plan of a command line: ``mesh`` replaces the mesh of the file, and ``settings`` replace settings of both.

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
        settings: dict[str, Any] = {"mesh": (meshes[0] if len(meshes) == 1 else meshes) if meshes else AUTO}
        named = self.said if self.auto else ()  # a search does not decide these, even if they have the default value
        for name in PLAN:
            if name in named or getattr(self, name) != _DEFAULTS[name]:
                settings[name] = getattr(self, name)
        if self.modules:
            settings["modules"] = {glob: entry.settings() for glob, entry in self.modules.items()}
        return settings

    def dump(self, path: str | os.PathLike[str] | None = None) -> str:
        """The plan as YAML. Also writes it to ``path``, if not None. `load` gives an equal plan."""
        text = written(self.settings())
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.dump())}</pre>"

    def replace(self, **changes: Any) -> Plan:
        """This plan with some settings changed. Raises PlanError, also for an unknown setting."""
        return Plan.from_dict({**self.settings(), **changes})

    def with_settings(self, settings: Iterable[str]) -> Plan:
        """This plan with ``key=value`` settings, as the command line takes them; a later one wins.

        The key is dotted: ``recompute``, ``mesh.tp`` or ``modules.<glob>.dp`` (a glob may itself contain dots). The value is
        YAML. An entry of ``modules`` that is set here comes after all others, so that it wins.
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
_DEFAULTS |= {"sequence_parallel": False, "recompute": "none", "schedule": "1f1b", "branches": "said"}
