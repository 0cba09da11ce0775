"""The blocks of code in the documentation, found and run.

A comment before a block says what is to be done with it; without one it is simply run:

    <!-- block: ranks=4 -->          python: on each of four local ranks, with the names of the page so far
    <!-- block: raises=PlanError --> python: it raises that, and the next block is the text of the error
    <!-- block: file=plan.yaml -->   any: written into the folder in which the page's commands run, too
    <!-- block: resolve=build,sample -->   yaml: a plan, which is resolved for these names of the page
    <!-- block: processes -->        bash: its scripts are started, too (else another test runs them)
    <!-- block: code=1 -->           bash: the last command ends with 1
    <!-- block: smaller=KEY=VALUE -->   bash: run with this ``--set``, a smaller model: that of the page is too large for these machines
    <!-- block: steps=4 -->          bash: `meshwright train` takes this many steps, and those of the page in `make proof`
    <!-- block: proof -->           bash, python: `make proof` alone runs it; else its commands are read, its Python is compiled
    <!-- block: as=PAGE -->          any: it stands on that page of docs/ too, with the same output, and is run there
    <!-- block: not run: why -->     any: it needs what is not here. Its Python is compiled, its bash and its YAML are read

``meshwright calibrate`` measures few sizes, and all of them in `make proof`.

A block ``text`` that comes directly after one that is run is what that prints; ``…`` stands for anything.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
RUN = ("python", "bash", "yaml")
MARKS = {"ranks", "raises", "file", "resolve", "processes", "code", "smaller", "steps", "proof", "as", "not run"}  # fmt: skip

_FENCE = re.compile(
    r"^(?:<!-- block: (?P<marks>.*?) -->\n)?(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block. ``output``: what the page says that it prints; None where it says nothing."""

    language: str
    text: str
    line: int
    marks: dict[str, str]
    output: str | None = None

    @property
    def said(self) -> tuple[str, str | None]:
        """What is run, and what that prints."""
        return self.text, self.output

    @property
    def is_run(self) -> bool:
        return self.language in RUN and "not run" not in self.marks


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    found = list(_FENCE.finditer(page))
    result = []
    for match, after in zip(found, [*found, None][1:], strict=True):
        prints = after is not None and after["language"] == "text" and not page[match.end() : after.start()].strip()
        result.append(
            Block(
                language=match["language"],
                text=_unindented(match["text"], match["indent"]),
                line=page.count("\n", 0, match.start("language")) + 1,
                marks=_marks(match["marks"] or ""),
                output=_unindented(after["text"], after["indent"]) if after is not None and prints else None,
            )
        )
    return result


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a block of bash, in words, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def _marks(text: str) -> dict[str, str]:
    if text.startswith("not run"):
        return {"not run": text.removeprefix("not run").lstrip(": ")}
    pairs = (word.partition("=") for word in text.split())
    return {key: value for key, _, value in pairs}


def _unindented(text: str, indent: str) -> str:
    return "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))
