"""``page``: a report as one HTML file."""

from __future__ import annotations

import json
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from meshwright.amounts import count_text, size_text
from meshwright.draw.html.payload import payload
from meshwright.draw.report import Report

_HERE = files("meshwright.draw.html")
_SCRIPTS = ("text", "layout", "page", "mesh", "model", "parameter", "step", "memory", "communication", "start")


def page(report: Report) -> str:
    """The file as text. It holds its styles, scripts and facts, and names no other file and no address."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    shards = report.shards
    least, most = min(shards.bytes_by_rank), max(shards.bytes_by_rank)
    return environment.from_string(_text("page.html.j2")).render(
        report=report,
        mesh=str(report.recipe.mesh),
        ranks=report.recipe.mesh.size,
        numel=count_text(shards.numel),
        size=size_text(shards.bytes),
        held=" to ".join(dict.fromkeys((size_text(least), size_text(most)))),
        style=Markup(_text("page.css")),
        script=Markup("\n".join(_text(f"{name}.js") for name in _SCRIPTS)),
        facts=Markup(_within_script(json.dumps(payload(report), separators=(",", ":")))),
    )


def _within_script(text: str) -> str:
    """JSON that may stand in a script element: none of its text ends the element, or begins another or a comment."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
