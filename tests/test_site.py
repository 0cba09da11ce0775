"""The documentation site: it builds, strictly, and fetches nothing; and what its pages claim of the source is so."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

import meshwright as mw
from browser import browser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FETCHED = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^"'> ]+""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet: what is not logged is not counted, and nothing is strict.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_site_fetches_nothing(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    # The address of a page itself, for search engines, is no fetch.
    fetched = {tag for page in pages for tag in FETCHED.findall(page.read_text("utf-8")) if "canonical" not in tag}
    assert not fetched


def test_the_site_opens_from_disk_and_its_search_finds_a_model(site: Path) -> None:
    """A browser starts no worker for a file; the model is one of the table of coverage."""
    with browser() as running:
        page, asked, errors = running.new_page(), [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((site / "howto" / "mesh.html").as_uri())
        page.keyboard.press("/")
        page.keyboard.type("wav2vec2")
        page.locator(".md-search-result__item").first.wait_for(timeout=60_000)
        assert "Coverage" in page.locator(".md-search-result__list").inner_text()
        assert not errors and not [address for address in asked if not address.startswith(("file:", "data:"))]


WIDTHS = {"a telephone": 390, "a laptop": 1280}


@pytest.mark.parametrize(
    "width",
    [
        pytest.param(width, id=name, marks=pytest.mark.proof if name == "a laptop" else ())
        for name, width in WIDTHS.items()
    ],
)
def test_no_page_is_wider_than_the_screen_and_no_picture_is_missing(site: Path, width: int) -> None:
    wrong = []
    with browser() as running:
        page = running.new_page(viewport={"width": width, "height": 900})
        for file in sorted(site.rglob("*.html")):
            if file.name != "404.html":  # it is served from any place, and names files from the root
                page.goto(file.as_uri())
                wide, missing = page.evaluate(
                    "[document.documentElement.scrollWidth, [...document.images].filter((i) => !i.naturalWidth).length]"
                )
                if wide > width or missing:
                    wrong.append((file.name, wide, missing))
    assert not wrong


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    assert set(_leaves(nav)) == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_the_reference_has_every_public_name() -> None:
    entries = re.findall(
        r"^::: meshwright\.(\S+)$", (DOCS / "reference" / "python.md").read_text("utf-8"), re.MULTILINE
    )
    assert sorted(entry.rpartition(".")[2] for entry in entries) == sorted(mw.__all__)


def test_every_test_that_the_traps_name_is_there() -> None:
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", (DOCS / "traps.md").read_text("utf-8"))
    assert len(named) > 50
    missing = [f"{file}::{test}" for file, test in named if test and test not in _functions(ROOT / "tests" / file)]
    missing += [file for file, _ in named if not (ROOT / "tests" / file).is_file()]
    assert not missing


def test_every_message_of_the_troubleshooting_is_text_of_the_source() -> None:
    headings = re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)
    assert len(headings) > 15
    begins = {" ".join(heading.split("…")[0].split()[:2]) for heading in headings}
    sources = [file.read_text("utf-8") for file in (ROOT / "src").rglob("*.py")]
    likely = [source for source in sources if any(begin in source for begin in begins)]  # to parse all takes seconds
    texts = [text for source in likely for text in _texts(ast.parse(source))]
    unknown = [heading for heading in headings if not any(heading.rstrip("…") in text for text in texts)]
    assert not unknown


def test_a_link_of_the_readme_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text("utf-8"))
    assert len(links) > 10
    assert not [link for link in links if not (ROOT / link).exists()]


def _leaves(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _leaves(part)


@cache
def _functions(file: Path) -> set[str]:
    if not file.is_file():
        return set()
    return {node.name for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


def _texts(tree: ast.AST) -> Iterator[str]:
    """Every text of a file; what an f-string puts in is an ellipsis."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
