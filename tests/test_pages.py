"""Every block of code in the README and in docs/ runs, and prints what the page says it prints. See pages.py for the marks."""

from __future__ import annotations

import ast
import doctest
import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

import meshwright as mw
from commands import calibrate_quickly, meshwright, read, write_profile
from meshwright.workers.pool import LocalWorkers
from pages import MARKS, PAGES, ROOT, RUN, Block, blocks, commands

WITH_CODE = [page for page in PAGES if any(block.is_run for block in blocks(page.read_text("utf-8")))]
WIDE = re.compile(r"(?<=\S) {2,}")  # between two columns
ROUNDING = re.compile(r"\d\.\de-1\d\b")  # an error in the last bits of a float64, which the machine decides
REASON = re.compile(r"\w.*")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


class Reader:
    """Does what a page says, in order; the names that its Python makes live as long as the page."""

    def __init__(self, folder: Path, workers: LocalWorkers, thorough: bool) -> None:
        self.thorough = thorough
        self.folder, self.workers, self.page = folder, workers, "a page"
        self.names: dict[str, Any] = {"__name__": "page"}

    def run(self, block: Block) -> None:
        if page := block.marks.get("as"):
            others = blocks((ROOT / "docs" / page).read_text("utf-8"))
            assert block.said in {other.said for other in others if other.is_run and "as" not in other.marks}, page
            return
        if "proof" in block.marks and not self.thorough:
            return check(block)
        if "file" in block.marks:
            (self.folder / block.marks["file"]).write_text(block.text, "utf-8")
        told = {"python": self.python, "bash": self.bash, "yaml": self.yaml}[block.language](block)
        if block.output is not None and self.smaller(block) is None:
            same(block.output, told)

    def python(self, block: Block) -> str:
        text = "\n" * block.line + block.text  # so that errors have the lines of the page
        code = compile(text, self.page, "exec")
        if ranks := block.marks.get("ranks"):
            used = {n: v for n, v in self.names.items() if n in code.co_names}
            (told, *_) = self.workers.run(_told, text, used, ranks=int(ranks))
            return str(told)
        if kind := block.marks.get("raises"):
            return _raised(code, self.names, kind)
        return _told(code, self.names)

    def cell(self, text: str) -> str | None:
        """Runs a cell of a notebook, and gives what is shown below it of its last expression: HTML or a picture."""
        *before, last = ast.parse(text, self.page).body
        value = None
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(before, []), self.page, "exec"), self.names)
            value = eval(compile(ast.Expression(last.value), self.page, "eval"), self.names)
        else:
            exec(compile(text, self.page, "exec"), self.names)
        shows = (getattr(value, show, None) for show in ("_repr_html_", "_repr_svg_"))
        return next((str(show()) for show in shows if show is not None), None)

    def yaml(self, block: Block) -> str:
        plan = mw.Plan.parse(block.text)
        if of := block.marks.get("resolve"):
            mw.make_recipe(*(self.names[n] if n != "plan" else plan for n in _order(of)))
        return ""

    def bash(self, block: Block) -> str:
        *before, last = (self.shortened(words, block) for words in commands(block.text))
        started, code = "processes" in block.marks, int(block.marks.get("code", 0))
        told = [self.command(words, started) for words in before]
        return "".join([*told, self.command(last, started, code)])

    def smaller(self, block: Block) -> str | None:
        """The settings with which a model is small enough for these machines; None: the block runs as it stands."""
        return block.marks.get("smaller")

    def shortened(self, words: list[str], block: Block) -> list[str]:
        """A command, with the smaller model and, of a training, the fewer steps that the block's marks say."""
        smaller, fewer = self.smaller(block), None if self.thorough else block.marks.get("steps")
        if smaller is not None:
            words = [*words, "--set", smaller]
        return [*words, "--steps", fewer] if words[:2] == ["meshwright", "train"] and fewer is not None else words

    def command(self, words: list[str], started: bool, code: int = 0) -> str:
        """What a command prints. ``started``: a script runs in processes of its own; ``code``: with which it ends."""
        program, *rest = words
        if program == "meshwright":
            return meshwright(*rest, code=code).output
        if started:
            return self.script(program, rest)
        if program == "make":
            assert f"\n{rest[0]}:" in (ROOT / "Makefile").read_text("utf-8"), f"no target {rest[0]}"
        elif program in ("python", "torchrun"):
            scripts = [word for word in rest if word.endswith(".py") and "/" in word]
            assert scripts or program == "torchrun", "a script of ours, which other tests run"
            assert all((ROOT / script).is_file() for script in scripts), f"no {scripts}"
        else:
            assert program == "pip", f"{program}: mark the block as not run, and say why"
        return ""

    def script(self, program: str, words: list[str]) -> str:
        """Starts a script of ours, as a person does, in the page's folder."""
        module = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[program]
        paths = os.pathsep.join([str(ROOT / "src"), *sys.path])
        run = subprocess.run(
            [sys.executable, *module, *words], cwd=self.folder, env={**os.environ, "PYTHONPATH": paths},
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        return run.stdout


def check(block: Block) -> None:
    """Reads a block that is not run now. Raises AssertionError for a command that is not there, and for what it does not take;
    SyntaxError for what is no Python."""
    if block.language == "python":
        compile(block.text, f"line {block.line}", "exec")
        return
    for program, *rest in commands(block.text):
        if program == "meshwright":
            read(*rest)
        else:
            assert all((ROOT / word).is_file() for word in rest if word.endswith(".py")), block.text


def _order(of: str) -> list[str]:
    build, batch, *loss = of.split(",")
    return [build, "plan", batch, *loss]


def _raised(code: Any, names: dict[str, Any], kind: str) -> str:
    """The text of the error, which is of that kind."""
    try:
        exec(code, names)
    except Exception as error:
        assert type(error).__name__ == kind
        return str(error)
    raise AssertionError(f"no {kind}")


def _told(code: Any, names: dict[str, Any]) -> str:
    told = io.StringIO()
    with redirect_stdout(told):
        exec(code, names)
    return told.getvalue()


def same(said: str, told: str) -> None:
    """What a page says is printed is what is printed, but for ``…``, errors of rounding, the ends of lines, and the width of
    columns, which depends on what stands at a ``…``."""
    want, got = ("\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n" for text in (said, told))
    want, got = (WIDE.sub("  ", ROUNDING.sub("…", text)) for text in (want, got))
    fits = doctest.OutputChecker().check_output(want.replace("…", "..."), got.replace("…", "..."), doctest.ELLIPSIS)
    assert fits, f"the page says\n{want}\nand this was printed\n{got}"


@pytest.fixture
def reader(
    workers: LocalWorkers, pooled: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Reader:
    """In a folder with the examples; what starts workers is given those of the session."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    write_profile()
    for place in ("meshwright.workers.pool", "meshwright.parity", "meshwright.prediction.predict"):
        monkeypatch.setattr(f"{place}.local_workers", lambda *_, **__: nullcontext(workers))
    monkeypatch.setattr(mw, "local_workers", lambda *_, **__: nullcontext(workers), raising=False)
    thorough = request.config.option.markexpr != "not proof"
    if not thorough:
        calibrate_quickly(workers, monkeypatch)
    return Reader(tmp_path, workers, thorough)


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_what_a_page_shows_is_so(page: Path, reader: Reader) -> None:
    pytest.importorskip("transformers")
    reader.page = name(page)
    for block in filter(lambda block: block.is_run, blocks(page.read_text("utf-8"))):
        try:
            reader.run(block)
        except BaseException as error:
            error.add_note(f"{name(page)}:{block.line}") if hasattr(error, "add_note") else None
            print(f"{name(page)}:{block.line}")
            raise


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_block_that_is_not_run_says_why_and_can_be_read(page: Path) -> None:
    for block in blocks(page.read_text("utf-8")):
        assert set(block.marks) <= MARKS, f"{name(page)}:{block.line}: a mark that says nothing"
        reason = block.marks.get("not run")
        assert reason is None or REASON.fullmatch(reason), f"{name(page)}:{block.line}"
        assert block.language in (*RUN, "text", "console"), f"{name(page)}:{block.line}: a block has a language"
        if reason is not None and block.language == "python":
            compile(block.text, f"{name(page)}:{block.line}", "exec")
        elif reason is not None and block.language == "bash":
            subprocess.run(["bash", "-n", "-c", block.text], check=True)


def test_yaml_that_is_no_plan_can_still_be_read() -> None:
    for page in PAGES:
        for block in blocks(page.read_text("utf-8")):
            if block.language == "yaml":
                list(yaml.safe_load_all(block.text))


@pytest.mark.parametrize(
    "wrong",
    [
        "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n",
        "```bash\nmeshwright shwo hf:gpt2\n```\n",
        "<!-- block: proof -->\n```bash\nmeshwright show hf:gpt2 --mehs tp=2\n```\n",
        "<!-- block: proof -->\n```bash\ntorchrun examples/none.py\n```\n",
        "```bash\nmake nothing\n```\n",
        "```yaml\nmesh: {tpp: 2}\n```\n",
        "<!-- block: raises=PlanError -->\n```python\n1 + 1\n```\n",
        "<!-- block: processes -->\n```bash\npython examples/mymodel.py\n```\n\n```text\nnothing\n```\n",
        "<!-- block: code=1 -->\n```bash\nmeshwright env\n```\n",
    ],
)
def test_a_page_that_says_what_is_not_so_is_found_out(wrong: str, reader: Reader) -> None:
    (block, *_) = blocks(wrong)
    try:
        reader.run(block)
    except (AssertionError, mw.PlanError):
        return
    pytest.fail("it was believed")


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(notebook: Path) -> list[str]:
    return ["".join(c["source"]) for c in json.loads(notebook.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]


# Branches are checked on the page `howto/concurrent.md`, too.
@pytest.mark.parametrize(
    "notebook",
    [pytest.param(n, id=name(n), marks=pytest.mark.proof if n.stem == "branches" else ()) for n in NOTEBOOKS],
)
def test_every_cell_of_a_notebook_runs_and_is_shown(notebook: Path, reader: Reader) -> None:
    reader.page = name(notebook)
    shown = [shown for text in cells(notebook) if (shown := reader.cell(text)) is not None]
    assert shown and all(one.startswith("<") and len(one) > 100 for one in shown)


@pytest.mark.proof  # an interpreter of its own for each, where nbclient is installed
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name)
def test_a_notebook_runs_in_a_kernel(notebook: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    nbclient.NotebookClient(nbformat.read(notebook, 4), timeout=200, kernel_name="python3").execute()


def test_the_notebooks_are_few_and_each_is_named_on_its_page() -> None:
    assert 4 <= len(NOTEBOOKS) <= 6
    page = (ROOT / "docs" / "tutorial" / "notebooks.md").read_text("utf-8")
    assert all(f"../notebooks/{notebook.name}" in page for notebook in NOTEBOOKS)


FRAME = re.compile(r"^ *([\w/]+\.py):\d+ in (\w+): (.+)$", re.MULTILINE)


def test_frames_of_the_library_on_pages_are_lines_of_its_source() -> None:
    """A report on a page shows the function and the source line that the library has. (Line numbers move with every change.)"""
    frames = {found for page in PAGES for found in FRAME.findall(page.read_text("utf-8"))}
    in_library = {frame for frame in frames if (ROOT / "src/meshwright" / frame[0]).is_file()}
    assert in_library, "docs/launch.md has a report with frames of the library"
    for file, function, line in in_library:
        source = (ROOT / "src/meshwright" / file).read_text("utf-8")
        functions = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", "") == function]
        texts = [ast.get_source_segment(source, node) or "" for node in functions]
        assert any(line in map(str.strip, text.splitlines()) for text in texts), f"{file}: {line} in {function}"
