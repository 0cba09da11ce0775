"""A function by its name: ``file.py:function``, or ``package.module:function``; and what to say where there is none."""

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


@dataclass(frozen=True)
class Role:
    """What a named function is for, in the words of an error.

    Attributes:
        place: where on a command line its name stands.
        forms: what may stand there.
        name: what such a function might be called.
        gives: what it is to do.
        code: one, to paste; ``{name}`` stands for its name.
        word: what a word without a file or module most likely meant; ``{word}`` stands for it.
    """

    place: str
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
        """What stands before the name, where it is no argument."""
        return f"{self.place} " if self.place.startswith("--") else ""

    @property
    def subject(self) -> str:
        """What problems are in, as the first line of an error has it."""
        return f"this {self.place.strip('-').lower()}"


def find(spec: str, role: Role, findings: Findings) -> Callable[..., Any] | None:
    """The function of a spec that `absolute` gave; None where something is wrong, which is in ``findings``."""
    with importing(spec.rpartition(":")[0]):
        module = _imported(spec, role, findings)
        return None if module is None else _function(module, spec, role, findings)


def absolute(spec: str, role: Role) -> str:
    """The spec, good in any directory. Raises PlanError if it is none."""
    place, colon, name = spec.rpartition(":")
    if not (colon and place and name.isidentifier()):
        findings = Findings(role.subject)
        path = place or spec
        fix = role.word.format(word=spec) if _is_word(spec) else ""
        fix = f"{path}:{role.name}" if path.endswith(".py") else fix or role.example
        findings.add(where=role.place, given=spec or "nothing", required=role.forms, fix=role.option + fix)
        findings.raise_if_any()
    return f"{os.path.abspath(place)}:{name}" if place.endswith(".py") else spec


def _is_word(spec: str) -> bool:
    return re.fullmatch(r"[\w-]+", spec) is not None


@contextmanager
def importing(place: str) -> Iterator[None]:
    """Modules beside a file, or in this directory, can be imported: as where Python runs that file."""
    folder = os.path.dirname(place) if place.endswith(".py") else os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _imported(spec: str, role: Role, findings: Findings) -> ModuleType | None:
    place = spec.rpartition(":")[0]
    try:
        return _load_file(place) if place.endswith(".py") else importlib.import_module(place)
    except FileNotFoundError:
        folder = Path(place).parent
        files = sorted(str(path.relative_to(folder)) for path in folder.glob("*.py")) if folder.is_dir() else []
        _not_there(os.path.basename(place), files, f"no file {place}", spec, role, findings)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(error.name + ".")):
            names = sorted(path.stem for path in Path.cwd().glob("*.py"))
            _not_there(place, names, f"no module {error.name}", spec, role, findings)
        else:
            fix = f"pip install {error.name}" if error.name else ""
            findings.add(where=line_of(error, place), given=str(error), required="a file that can be imported", fix=fix)
    except Exception as error:  # whatever a person's file may raise
        findings.add(where=line_of(error, place), given=told(error), required="a file that can be imported")
    return None


def _load_file(file: str) -> ModuleType:
    """The module of a file; run once a process. It is entered in ``sys.modules``, where pickle looks for it."""
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
    place, _, name = spec.rpartition(":")
    function = getattr(module, name, None)
    if callable(function):
        return function
    names = [
        n for n, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    given = f"{name} is no function" if function is not None else f"no function {name}"
    near = nearest(name, names) or tuple(names[:3])
    required = f"a function there: {listing(near)}" if near else f"a function there that {role.gives}"
    fix = role.option + f"{short(place)}:{near[0]}" if near else role.code.format(name=name)
    findings.add(where=short(place), given=given, required=required, fix=fix)
    return None


def _not_there(name: str, names: list[str], what: str, spec: str, role: Role, findings: Findings) -> None:
    near = nearest(name, names) or tuple(names[:3])
    function = spec.rpartition(":")[2]
    required = f"one that is there: {listing(near)}" if near else role.forms
    fix = f"{near[0]}:{function}" if near else role.example
    findings.add(where=role.place, given=what, required=required, fix=role.option + fix)


def line_of(error: BaseException, place: str) -> str:
    """The innermost line of the person's own file that an error came from."""
    if isinstance(error, SyntaxError) and error.filename:
        return source_place(error.filename, error.lineno, error.offset)
    file = place if place.endswith(".py") else getattr(sys.modules.get(place), "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return source_place(file, lines[-1]) if file and lines else short(place)


def told(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}".rstrip(": ")


def short(path: str) -> str:
    """A path below this directory is named from here."""
    here = os.path.relpath(path) if os.path.isabs(path) else path
    return path if here.startswith("..") else here
