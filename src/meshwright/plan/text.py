"""Reads YAML with the position of every value, and writes YAML.

The safe loader reads it node by node, so that no tag creates an object, and no alias expands without end.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from meshwright.errors import Findings
from meshwright.plan.source import WIDE, KeyPath, Source, example


class _Dumper(yaml.SafeDumper):
    """A dumper that escapes Unicode line separators. YAML would read them as spaces."""


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = '"' if any(c in text for c in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted)


def written(values: object) -> str:
    """Plain values as YAML text. Reading this text gives equal values."""
    return yaml.dump(values, Dumper=_Dumper, default_flow_style=None, sort_keys=False, allow_unicode=True, width=WIDE)


def read_file(path: str) -> Source:
    """The plain values of a YAML file. If the file cannot be read, the source has a finding."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror or str(error) if isinstance(error, OSError) else "bytes that are not UTF-8"
        source = Source(None)
        source.places[()] = path
        source.findings.add(where=path, given=problem, required="a YAML file that can be read", fix=example())
        return source
    return compose(text, path)


def compose(text: str, name: str, findings: Findings | None = None) -> Source:
    """The plain values of a YAML text, with positions ``name:line:column`` (both from 1).

    If the text is not YAML, or a value is not plain, the source has a finding. All keys are strings, even ``1`` and ``true``.

    Args:
        name: the name of the text in positions.
        findings: default: new ones.
    """
    source = Source(None, findings)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        source.places[()] = f"{name}:1:1"
        source.values = None if node is None else _Values(name, source).value(node, ())
    except yaml.YAMLError as error:
        _not_yaml(error, text, name, source.findings)
    except RecursionError:
        source.findings.add(where=f"{name}:1:1", given="brackets within brackets", required="a plan", fix=example())
    return source


class _Values:
    """Builds plain values from YAML nodes. A node with several aliases is built once."""

    def __init__(self, name: str, source: Source) -> None:
        self.name = name
        self.source = source
        self.built: dict[int, object] = {}

    def value(self, node: yaml.Node, path: KeyPath) -> object:
        """The value of a node, whose path in the plan is ``path``."""
        self.source.places[path] = self.position(node)
        if id(node) in self.built:
            return self.built[id(node)]
        self.built[id(node)] = None  # the value of an alias to a node within that node
        if isinstance(node, yaml.MappingNode):
            value: object = self.mapping(node, path)
        elif isinstance(node, yaml.SequenceNode):
            value = [self.value(item, (*path, str(i))) for i, item in enumerate(node.value)]
        else:
            value = self.scalar(node)
        self.built[id(node)] = value
        return value

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        """The value of a mapping node. Adds a finding for each key that is not a plain name, or occurs twice."""
        values: dict[str, object] = {}
        for key, value in node.value:
            position = self.position(key)
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                problem = "a merge" if isinstance(key, yaml.ScalarNode) else "a key of several values"
                self.source.findings.add(where=position, given=problem, required="a name as key", fix="name: value")
                continue
            key_path = (*path, key.value)
            if key.value in values:
                problem = f"the key {key.value} again, after {self.source.keys[key_path]}"
                fix = f"leave out one of the two {key.value}"
                self.source.findings.add(where=position, given=problem, required="each key once", fix=fix)
                continue
            self.source.keys[key_path] = position
            values[key.value] = self.value(value, key_path)
        return values

    def scalar(self, node: yaml.Node) -> object:
        """The value of a scalar node. Adds a finding for a tag that makes no plain value, and returns None."""
        try:
            return yaml.constructor.SafeConstructor().construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            problem = f"{node.tag} {node.value}" if isinstance(error, yaml.YAMLError) else str(node.value)
            required = "a plain value: text, a number, true or false"
            self.source.findings.add(where=self.position(node), given=problem, required=required, fix=f'"{node.value}"')
            return None

    def position(self, node: yaml.Node) -> str:
        """``name:line:column`` of a node's start."""
        return f"{self.name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _not_yaml(error: yaml.YAMLError, text: str, name: str, findings: Findings) -> None:
    """Adds the finding for a text that is not YAML: the wrong line, and the most likely correction of it."""
    reason, index = str(error), 0
    if isinstance(error, yaml.MarkedYAMLError):
        reason = error.problem or reason
        mark, opened = error.problem_mark or error.context_mark, error.context_mark
        if mark and opened and opened.line < mark.line and _OPENS.search(error.context or ""):
            mark = opened  # a missing end is noticed lines later: report where it was opened
        index = mark.index if mark else 0
    elif isinstance(error, yaml.reader.ReaderError):
        reason, index = error.reason, error.position
    before = text[:index].splitlines(keepends=True) or [""]
    if before[-1].endswith("\n"):
        before.append("")
    line = before[-1] + text[index:].partition("\n")[0]
    wrong_line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line.strip()) or "nothing"
    position = f"{name}:{len(before)}:{len(before[-1]) + 1}"
    findings.add(where=position, given=wrong_line, required=f"YAML: {reason}", fix=_corrected(line))


_PLACE = re.compile(r"""(?<![\w'"])((?:tp|pp|stream)\[[0-9:]*\])(?!['"])""")
_OPENS = re.compile("flow|quoted|simple key")


def _corrected(line: str) -> str:
    """The most likely correction of a line that is not YAML."""
    if "\t" in line:
        return line.expandtabs(2)
    line = "".join(c for c in line if c.isprintable()).strip()
    if (quoted := _PLACE.sub(r"'\1'", line)) != line:  # brackets within braces read as a list
        return quoted
    if match := re.fullmatch(r"(\*[^:\s]*)(:.*)", line):  # a bare glob reads as an alias
        return f'"{match[1]}"{match[2]}'
    for quote in "\"'":
        if line.count(quote) % 2:
            return line + quote
    for start, end in ("{}", "[]"):
        if (missing := line.count(start) - line.count(end)) > 0:
            return line + end * missing
    if match := re.fullmatch(r"([\w.]+)\s*[:=]?\s*([^:]+)", line):
        return f"{match[1]}: {match[2]}"
    return example()
