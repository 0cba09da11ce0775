"""``read_profile``: reads a profile from a YAML file with units, or raises one error with every problem of the file.

    name: h100-sxm
    memory: 79.1 GiB
    peak: {bfloat16: 989.4 Tflop/s}
    matmul: {bfloat16: {1 Gflop: 0.28, 100 Gflop: 0.79}}
    nodes: {dgx: {devices: 8, latency: 0.8 us, bandwidth: 450 GB/s, efficiency: {1 MiB: 0.3, 1 GiB: 0.7}, scatter: 0.15}}

The sizes in a curve are sizes of one call. A file may have several nodes and networks; its keys ``node`` and ``network``
name the default ones. The other keys are the attributes of `Profile` and `Link`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from importlib.resources import files
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from meshwright.errors import Finding, Findings, listing, nearest
from meshwright.hardware.profile import Curve, Link, Profile
from meshwright.hardware.profile_file import CPU_LOCAL, calibrated_file
from meshwright.hardware.quantity import EXAMPLES, UNITS, Kind, read_quantity, spell_quantity
from meshwright.hardware.text import ABSENT
from meshwright.plan.source import KeyPath, Source, example, flow
from meshwright.plan.text import compose

T = TypeVar("T")

ALIASES = {
    "a100": "a100-80",
    "h100": "h100-sxm",
    "h200": "h200-sxm",
    "b200": "b200-sxm",
    "v100-sxm2": "v100",
}
"""Short name → name of a profile of this package."""

_TEXTS = ("name", "source", "date")
_SIZES = ("memory", "context", "per_group")
_TIMES = ("launch", "host", "host_backward", *ABSENT)
_CURVES = ("matmul", "attention")
_LINK = {"latency": "1 us", "bandwidth": "450 GB/s", "efficiency": "{1 MiB: 0.3, 1 GiB: 0.8}", "scatter": "0.1"}
_LINK_KEYS = (*_LINK, "source", "start", "in_switch", "mesh", "kinds", "segment")
_REQUIRED = {
    "name": "h100-lab",
    "source": "data sheet of NVIDIA",
    "date": "2026-11-23",
    "memory": "79 GiB",
    "context": "600 MiB",
    "per_group": "400 MiB",
    "reserve": "0.05",
    "peak": "{bfloat16: 989 Tflop/s}",
    "matmul": "{bfloat16: {1 Gflop: 0.3, 100 Gflop: 0.8}}",
    "attention": "{bfloat16: {1 Gflop: 0.1, 1 Tflop: 0.5}}",
    "bandwidth": "3.35 TB/s",
    "streaming": "{1 MB: 0.2, 100 MB: 0.8}",
    "launch": "2 us",
    "host": "5 us",
    "host_backward": "5 us",
    "scatter": "0.1",
    "nodes": "{node: {devices: 8, " + ", ".join(f"{key}: {value}" for key, value in _LINK.items()) + "}}",
}
_KEYS = (
    *_REQUIRED,
    *ABSENT,
    "update_fraction",
    "skew",
    "contention",
    "slower",
    "notes",
    "cores",
    "node",
    "networks",
    "network",
)


def read_profile(name_or_path: str, *, node: str | None = None, network: str | None = None) -> Profile:
    """Reads a profile.

    Args:
        name_or_path: a name or alias of a profile of this package (``profiles()``); ``cpu-local``, the profile of this
            machine (``calibrated_file``); or the path of a YAML file.
        node, network: the name of a node and of a network in the file. Default: those that the file names, or its first.

    Raises:
        PlanError: the file cannot be read (the error lists the known names), or has problems (the error lists all of them).

    >>> read_profile("h100").name
    'h100-sxm'
    """
    shipped = _folder() / f"{ALIASES.get(name_or_path, name_or_path)}.yaml"
    is_name = shipped.is_file() and "/" not in name_or_path
    file = shipped if is_name else calibrated_file() if name_or_path == CPU_LOCAL else Path(name_or_path)
    findings = Findings(f"hardware profile {name_or_path}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror or str(error) if isinstance(error, OSError) else "bytes that are not UTF-8"
        findings.extend([_unread(name_or_path, file, problem)])
        raise findings.error() from None
    file_name = file.name if is_name else str(file)
    return parse_profile(text, file_name, node=node, network=network)


def _unread(name_or_path: str, file: Path, problem: str) -> Finding:
    """The finding for a file that cannot be read. It lists the known names, and proposes the nearest one."""
    names = [*profiles(), *ALIASES]
    if name_or_path == CPU_LOCAL:
        required = f"the profile of this machine, which meshwright calibrate measures; or one of {', '.join(names)}"
        return Finding(f"{CPU_LOCAL} ({file})", problem, required, "meshwright calibrate")
    near = nearest(name_or_path, [*names, CPU_LOCAL], most=1)
    required = f"a YAML file, or one of {', '.join(names)}, or {CPU_LOCAL}, which meshwright calibrate measures"
    return Finding(name_or_path, problem, required, near[0] if near else names[0])


def parse_profile(text: str, file: str, *, node: str | None = None, network: str | None = None) -> Profile:
    """The profile in a YAML text.

    Args:
        file: the name of the text in findings.
        node, network: see ``read_profile``.

    Raises:
        PlanError: every problem of the text.
    """
    source = compose(text, file, Findings(f"hardware profile {file}"))
    # For a text that is no YAML, the reader of plans proposes an example plan: leave this proposal out.
    findings = [Finding(f.where, f.given, f.required, "" if f.fix == example() else f.fix) for f in source.findings]
    source.findings = Findings(source.findings.subject)
    source.findings.extend(findings)
    if source.values is None:
        source.findings.raise_if_any()
    return _Reader(source).profile(node, network)


def profiles() -> dict[str, str]:
    """Name of each profile of this package → one line that describes it."""
    # The first line of each file is a comment with this description.
    return {
        file.stem: file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
        for file in sorted(_folder().glob("*.yaml"))
    }


def _folder() -> Path:
    return Path(str(files("meshwright.hardware") / "profiles"))


class _Reader:
    """Builds a profile from the plain values of a file, and adds a finding for each problem.

    A method that reads a value returns None, 0 or an empty value if it added a finding.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.findings = source, source.findings

    def profile(self, node: str | None, network: str | None) -> Profile:
        """The profile with the node and network of these names. Raises PlanError if there is any finding."""
        values = self.section(self.source.values, (), _KEYS, _REQUIRED, "a profile")
        peak = self.table(values, "peak", lambda v, path: self.quantity(v, path, "flop/s"))
        curves = {key: self.table(values, key, lambda v, path: self.curve(v, path, "flop")) for key in _CURVES}
        for key, curve in curves.items():
            self.rated(key, curve, values.get("peak"))
        nodes = self.table(values, "nodes", self.node)
        networks = self.table(values, "networks", self.link)
        chosen = self.choose("node", nodes, node, values)
        fields: dict[str, Any] = {
            **{key: self.text(values, key) for key in (*_TEXTS, "notes")},
            **{key: int(self.quantity_of(values, key, "B", zero=key != "memory")) for key in _SIZES},
            **{key: self.quantity_of(values, key, "s", zero=key in ("launch", *ABSENT)) for key in _TIMES},
            **{key: self.fraction(values, key) for key in ("reserve", "contention", "scatter")},
            "update_fraction": self.fraction(values, "update_fraction", absent=1.0),
            **curves,
            "peak": peak,
            "bandwidth": self.quantity_of(values, "bandwidth", "B/s"),
            "streaming": self.curve_of(values, (), "streaming"),
            "network": self.choose("network", networks, network, values),
            "cores": self.integer(values, (), "cores", least=0),
            "skew": self.curve_of(values, (), "skew", "s"),
            "slower": self.times(values, "slower"),
        }
        if self.findings or chosen is None:  # if there is no node, there is a finding
            raise self.findings.error()
        return Profile(**fields, devices_per_node=chosen[0], node=chosen[1])

    def section(
        self, values: object, path: KeyPath, keys: Sequence[str], required: Mapping[str, str], owner: str
    ) -> dict[str, Any]:
        """The known keys of a mapping with their values. Adds a finding for each unknown key and each missing one."""
        if not isinstance(values, Mapping):
            self.add(path, flow(values) if values is not None else "nothing", f"the keys of {owner}: {', '.join(keys)}")
            return {}
        for key in values:
            if key not in keys:
                near = nearest(str(key), keys, most=1)
                fix = f"{near[0]}: {flow(values[key])}" if near else f"leave out {key}"
                self.add((*path, str(key)), f"the key {key}", f"a key of {owner}: {', '.join(keys)}", fix, key=True)
        for key, fit in required.items():
            if values.get(key) is None:
                self.add(path, f"no {key}", f"the key {key}", f"{key}: {fit}")
        return {key: values[key] for key in keys if values.get(key) is not None}

    def table(self, values: dict[str, Any], key: str, read: Callable[[object, KeyPath], T | None]) -> dict[str, T]:
        """A mapping of names to values that ``read`` reads. Leaves out wrong values; ``read`` adds a finding for each."""
        entries = values.get(key, {})
        if not isinstance(entries, Mapping) or (key in values and not entries):
            self.add((key,), flow(entries), "names with what belongs to each")
            return {}
        parsed = {str(name): read(value, (key, str(name))) for name, value in entries.items()}
        return {name: value for name, value in parsed.items() if value is not None}

    def rated(self, key: str, curves: Iterable[str], peak: object) -> None:
        """Adds a finding for each curve whose dtype has no peak, since a curve is a fraction of a peak."""
        if isinstance(peak, Mapping):
            for dtype in curves:
                if dtype not in peak:
                    required = f"a type that has a peak: {listing([*peak])}"
                    self.add((key, dtype), f"a curve of {dtype}", required)

    def choose(self, key: str, entries: dict[str, T], wanted: str | None, values: dict[str, Any]) -> T | None:
        """The node or network named ``wanted``; without it, the one that the file names as default; else the first.

        ``key``: "node" or "network". ``entries``: those of the file that could be read.
        """
        section = values.get(f"{key}s")
        names = [str(name) for name in section] if isinstance(section, Mapping) else []
        name = wanted or values.get(key) or next(iter(names), None)
        if name is not None and name not in names:
            where = f"{key} {wanted}" if wanted else self.source.where((key,))
            required = f"one of the {key}s of this profile: {listing(names) or 'it has none'}"
            near = nearest(str(name), names, most=1) or tuple(names[:1])
            self.findings.add(where=where, given=flow(name), required=required, fix=f"{key}: {near[0]}" if near else "")
            return None
        return entries.get(name) if name is not None else None  # None: an entry with a problem, which has its finding

    def node(self, values: object, path: KeyPath) -> tuple[int, Link] | None:
        """(number of devices of a node, the link between them)."""
        devices = None
        if isinstance(values, Mapping):
            devices = self.integer({**values}, path, "devices", least=1)
            if "devices" not in values:
                self.add(path, "no devices", "how many devices a node has", "devices: 8")
            values = {key: value for key, value in values.items() if key != "devices"}
        link = self.link(values, path)
        return (devices, link) if devices and link else None

    def link(self, values: object, path: KeyPath) -> Link | None:
        """A link; None if it has any problem."""
        before = len(self.findings)
        entries = self.section(values, path, _LINK_KEYS, _LINK, "a link")
        fields: dict[str, Any] = {
            "latency": self.quantity_of(entries, "latency", "s", path),
            "bandwidth": self.quantity_of(entries, "bandwidth", "B/s", path),
            "efficiency": self.curve_of(entries, path, "efficiency"),
            "scatter": self.fraction(entries, "scatter", path),
            "source": self.text(entries, "source", path),
            "start": self.quantity_of(entries, "start", "s", path, zero=True),
            "in_switch": self.fraction(entries, "in_switch", path),
            "mesh": entries.get("mesh", False),
            "kinds": self.times(entries, "kinds", path),
            "segment": self.quantity_of(entries, "segment", "B", path, zero=True),
        }
        if not isinstance(fields["mesh"], bool):
            self.add((*path, "mesh"), flow(fields["mesh"]), "true or false", "mesh: true")
        return Link(name=path[-1], **fields) if len(self.findings) == before else None

    def curve_of(self, values: dict[str, Any], path: KeyPath, key: str, kind: Kind = "B") -> Curve | None:
        return self.curve(values[key], (*path, key), kind) if key in values else None

    def curve(self, values: object, path: KeyPath, kind: Kind) -> Curve | None:
        """A curve: sizes with efficiencies, from small to large. A larger call must take at least as long as a smaller one."""
        required = f"sizes with fractions above 0 and at most 1, from small to large: {{{EXAMPLES[kind]}: 0.5}}"
        if not isinstance(values, Mapping) or not values:
            self.add(path, flow(values), required)
            return None
        points = []
        for key, value in values.items():
            point_path = (*path, str(key))
            size = self.quantity(key, point_path, kind, key=True)
            if not _is_number(value) or not 0 < value <= 1:
                self.add(point_path, flow(value), "a fraction above 0 and at most 1", f"{key}: 0.5")
            elif size is not None:
                points.append((size, float(value), point_path))
        for (small, low, _), (large, high, point_path) in pairwise(points):
            if small >= large:
                self.add(point_path, f"{point_path[-1]} after {spell_quantity(small, kind)}", required)
            elif large / high < small / low * (1 - 1e-3):
                problem = f"{point_path[-1]}: {high:g}, which takes less time than {spell_quantity(small, kind)}"
                self.add(
                    point_path, problem, f"at most {low * large / small:.3g}: the time of a call grows with its size"
                )
        return None if len(points) < len(values) else _curve(points)

    def quantity_of(
        self, values: dict[str, Any], key: str, kind: Kind, path: KeyPath = (), *, zero: bool = False
    ) -> float:
        return (self.quantity(values[key], (*path, key), kind, zero=zero) or 0.0) if key in values else 0.0

    def quantity(
        self, value: object, path: KeyPath, kind: Kind, *, zero: bool = False, key: bool = False
    ) -> float | None:
        size = read_quantity(value, kind)
        if size is None or (not size and not zero):
            required = f"a number {'' if zero else 'above 0 '}and a unit ({', '.join(UNITS[kind])}): {EXAMPLES[kind]}"
            fix = EXAMPLES[kind] if key else f"{path[-1]}: {EXAMPLES[kind]}"
            self.add(path, flow(value), required, fix, key=key)
            return None
        return size

    def fraction(self, values: dict[str, Any], key: str, path: KeyPath = (), *, absent: float = 0.0) -> float:
        value = values.get(key, absent)
        if not _is_number(value) or not 0 <= value <= 1:
            self.add((*path, key), flow(value), "a fraction from 0 to 1", f"{key}: 0.1")
            return absent
        return float(value)

    def times(self, values: dict[str, Any], key: str, path: KeyPath = ()) -> dict[str, float]:
        """A mapping of names to factors above 0, by which a call takes longer."""
        section = values.get(key, {})
        factors: dict[str, float] = {}
        for name, value in section.items() if isinstance(section, Mapping) else [("", section)]:
            if isinstance(name, str) and name and _is_number(value) and value > 0:
                factors[name] = float(value)
            else:
                self.add(
                    (*path, key), flow(section), "names with numbers above 0", f"{key}: {{{example_of(key)}: 2.0}}"
                )
        return factors

    def integer(self, values: dict[str, Any], path: KeyPath, key: str, *, least: int) -> int:
        value = values.get(key, least)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.add((*path, key), flow(value), f"a whole number of at least {least}", f"{key}: 8")
            return least
        return value

    def text(self, values: dict[str, Any], key: str, path: KeyPath = ()) -> str:
        value = values.get(key, "")
        if key == "date" and value:
            return self.day(value)
        if not isinstance(value, str):
            self.add((*path, key), flow(value), "text", f'{key}: "{value}"')
        return str(value).strip()

    def day(self, value: object) -> str:
        try:
            return (value if isinstance(value, date) else date.fromisoformat(str(value))).isoformat()
        except ValueError:
            self.add(("date",), flow(value), "a day: 2026-11-23", "date: 2026-11-23")
            return ""

    def add(self, path: KeyPath, actual: str, required: str, fix: str = "", *, key: bool = False) -> None:
        self.findings.add(where=self.source.where(path, key=key), given=actual, required=required, fix=fix)


def example_of(key: str) -> str:
    """A name that may stand under ``kinds`` or ``slower``, for a fix."""
    return "reduce_scatter" if key == "kinds" else "gelu"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _curve(points: list[tuple[float, float, KeyPath]]) -> Curve | None:
    try:
        return Curve(tuple((size, efficiency) for size, efficiency, _ in points))
    except ValueError:
        return None  # ``_Reader.curve`` has added the finding
