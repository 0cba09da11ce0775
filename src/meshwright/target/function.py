"""Finds a function by its name, ``file.py:function`` or ``package.module:function``, or reports why there is none."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.errors import Findings, listing, nearest, source_place

_SUGGESTIONS = 3  # names that an error shows if none is similar to the wrong one


@dataclass(frozen=True)
class Role:
    """The use of a named function, as texts for errors.

    Attributes:
        label: the argument or option that names the function: ``TARGET`` or ``--loss``.
        forms: the forms that its value can have.
        name: an example of a function's name.
        gives: what the function has to do.
        code: an example function to paste. ``{name}`` is replaced by its name.
        word: the fix for a value that is a single word. ``{word}`` is replaced by that word.
    """

    label: str
    forms: str
    name: str
    gives: str
    code: str
    word: str = ""

    @property
    def example(self) -> str:
        return f"train.py:{self.name}"

    @property
    def option(self) -> str:
        """The option with a space, to put before the name in a fix; empty for an argument."""
        return f"{self.label} " if self.label.startswith("--") else ""

    @property
    def subject(self) -> str:
        """The subject of an error's first line, such as ``this target``."""
        return f"this {self.label.strip('-').lower()}"


def find(spec: str, role: Role, findings: Findings) -> Callable[..., Any] | None:
    """The function of a name that `absolute` returned. None if there is a problem, which is added to ``findings``."""
    with importing(spec.rpartition(":")[0]):
        module = _imported(spec, role, findings)
        return None if module is None else _function(module, spec, role, findings)


def absolute(spec: str, role: Role) -> str:
    """The name of a function with an absolute path, valid in any directory. Raises PlanError if the form is not valid."""
    source, colon, name = spec.rpartition(":")
    if not (colon and source and name.isidentifier()):
        findings = Findings(role.subject)
        path = source or spec
        if path.endswith(".py"):
            fix = f"{path}:{role.name}"
        elif _is_word(spec) and role.word:
            fix = role.word.format(word=spec)
        else:
            fix = role.example
        findings.add(where=role.label, given=spec or "nothing", required=role.forms, fix=role.option + fix)
        findings.raise_if_any()
    return f"{os.path.abspath(source)}:{name}" if source.endswith(".py") else spec


def _is_word(spec: str) -> bool:
    return re.fullmatch(r"[\w-]+", spec) is not None


@contextmanager
def importing(source: str) -> Iterator[None]:
    """In its block, modules in the folder of a file can be imported, as if Python ran that file; for a module, those in the
    current directory."""
    folder = os.path.dirname(source) if source.endswith(".py") else os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _imported(spec: str, role: Role, findings: Findings) -> ModuleType | None:
    """Imports the file or module of a name. None if there is a problem, which is added to ``findings``."""
    source = spec.rpartition(":")[0]
    required = "a file that can be imported"
    try:
        return _load_file(source) if source.endswith(".py") else importlib.import_module(source)
    except FileNotFoundError:
        folder = Path(source).parent
        files = sorted(str(path.relative_to(folder)) for path in folder.glob("*.py")) if folder.is_dir() else []
        _add_missing(os.path.basename(source), files, f"no file {source}", spec, role, findings)
    except ModuleNotFoundError as error:
        if error.name and (source == error.name or source.startswith(error.name + ".")):
            modules = sorted(path.stem for path in Path.cwd().glob("*.py"))
            _add_missing(source, modules, f"no module {error.name}", spec, role, findings)
        else:
            fix = f"pip install {error.name}" if error.name else ""
            findings.add(where=line_of(error, source), given=str(error), required=required, fix=fix)
    except Exception as error:  # a person's file may raise anything
        findings.add(where=line_of(error, source), given=error_text(error), required=required)
    return None


def _load_file(file: str) -> ModuleType:
    """The module of a file, which runs once in a process. It is entered in ``sys.modules``, where pickle looks for it."""
    name = f"{Path(file).stem}_{zlib.crc32(file.encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if not os.path.exists(file):
        raise FileNotFoundError(file)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _function(module: ModuleType, spec: str, role: Role, findings: Findings) -> Callable[..., Any] | None:
    """The function of a module. None if the module lacks it, with a finding."""
    source, _, name = spec.rpartition(":")
    function = getattr(module, name, None)
    if callable(function):
        return function
    names = [
        n for n, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    given = f"{name} is no function" if function is not None else f"no function {name}"
    suggestions = nearest(name, names) or tuple(names[:_SUGGESTIONS])
    if suggestions:
        required = f"a function there: {listing(suggestions)}"
        fix = role.option + f"{short_path(source)}:{suggestions[0]}"
    else:
        required = f"a function there that {role.gives}"
        fix = role.code.format(name=name)
    findings.add(where=short_path(source), given=given, required=required, fix=fix)
    return None


def _add_missing(name: str, names: list[str], given: str, spec: str, role: Role, findings: Findings) -> None:
    """Adds a finding for a file or module that does not exist. ``names``: those that exist, to suggest one."""
    suggestions = nearest(name, names) or tuple(names[:_SUGGESTIONS])
    function = spec.rpartition(":")[2]
    required = f"one that is there: {listing(suggestions)}" if suggestions else role.forms
    fix = f"{suggestions[0]}:{function}" if suggestions else role.example
    findings.add(where=role.label, given=given, required=required, fix=role.option + fix)


def line_of(error: BaseException, source: str) -> str:
    """The innermost line of a person's own file or module that raised an error; the file, if no line of it did."""
    if isinstance(error, SyntaxError) and error.filename:
        return source_place(error.filename, error.lineno, error.offset)
    file = source if source.endswith(".py") else getattr(sys.modules.get(source), "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return source_place(file, lines[-1]) if file and lines else short_path(source)


def error_text(error: BaseException) -> str:
    """The type and text of an exception."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}".rstrip(": ")


def short_path(path: str) -> str:
    """A path relative to the current directory, if it is below it; other paths as they are."""
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return path if relative.startswith("..") else relative
