"""``page``: a report as one HTML file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from meshwright.amounts import count_text, size_text
from meshwright.draw.facts import ShardMap
from meshwright.draw.html.payload import payload

if TYPE_CHECKING:
    from meshwright.draw.report import Report  # which imports this file

_HERE = files("meshwright.draw.html")
_SCRIPTS = (
    "text",
    "layout",
    "page",
    "mesh",
    "model",
    "parameter",
    "timeline",
    "step",
    "memory",
    "communication",
    "start",
)


def page(report: Report, *, rank: int = 0, parameter: str | None = None) -> str:
    """The file as text, with styles, scripts and facts. It refers to no other file and no address.

    Args:
        report: the facts to draw.
        rank: the rank that is selected when the page opens.
        parameter: a glob for the parameter that is selected then. Default: a large sharded one.

    Raises:
        ValueError: the mesh has no such rank.
        KeyError: no parameter matches the glob.
    """
    shards = report.shards
    report.recipe.mesh.coordinate(rank)  # raises ValueError for an unknown rank
    first = None if parameter is None else shards.matching(parameter)[0].first.name
    data = {**payload(report), "rank": rank, "row": _row_of(shards, first)}
    least, most = min(shards.bytes_by_rank), max(shards.bytes_by_rank)
    return filled(
        "page.html.j2",
        _SCRIPTS,
        data,
        report=report,
        mesh=str(report.recipe.mesh),
        ranks=report.recipe.mesh.size,
        numel=count_text(shards.numel),
        size=size_text(shards.bytes),
        held=" to ".join(dict.fromkeys((size_text(least), size_text(most)))),
    )


def filled(template: str, scripts: Sequence[str], data: Any, **values: Any) -> str:
    """Fills a template of this folder with styles, scripts and facts.

    Args:
        template: name of the file.
        scripts: names of script files, in the order in which they run.
        data: plain values, which the scripts get as ``facts``.
        values: other variables of the template.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_text(template)).render(
        style=Markup(_text("page.css")),
        script=Markup("\n".join(_text(f"{name}.js") for name in scripts)),
        facts=Markup(_within_script(json.dumps(data, separators=(",", ":")))),
        **values,
    )


def _row_of(shards: ShardMap, name: str | None) -> int | None:
    """The index of a parameter's row; None if there is none."""
    return next((i for i, row in enumerate(shards.rows) if name in row.names), None)


def _within_script(text: str) -> str:
    """JSON with &, < and > escaped, so that its text cannot end the script element or begin another one or a comment."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
