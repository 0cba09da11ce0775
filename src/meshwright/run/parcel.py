"""A parcel: a pickled value, and word of where its functions and classes are to be found in another process.

Pickle names functions and classes by module. Three kinds of module cannot simply be imported elsewhere:

    the main script          Its file runs again in the receiver, under the name `__mp_main__` (so a main
                             guard holds), and only if the parcel names something in it. It stops at its first
                             use of workers, so it needs no main guard; what it does before, it does again;
                             of what comes after, only imports, functions and classes are taken.
    a file loaded by path    The path travels along, and is loaded under the same name.
    an interactive session   It has no source to send: an error says so.

Tensors travel as plain bytes: nothing is shared and no descriptor can leak. A view carries its whole storage.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import io
import os
import pickle
import sys
import types
from dataclasses import dataclass, field
from typing import Any

_MAIN_NAMES = ("__main__", "__mp_main__")


class MainReachedWorkers(BaseException):
    """Raised by workers that the main script uses, when it runs in a worker only to define its functions."""


@dataclass(frozen=True)
class Names:
    """Where the receiver of a parcel finds the modules it names."""

    main: tuple[str, str] | None = None  # ("module", its name), ("path", its file) or ("code", its text)
    files: dict[str, str] = field(default_factory=dict)  # module → source file, to fall back on


def pack(value: object) -> tuple[bytes, Names]:
    """Pickle a value. Errors: `TypeError`, with what to do, for what cannot be pickled."""
    buffer = io.BytesIO()
    packer = _Packer(buffer)
    try:
        packer.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"cannot be sent to another process: {error}. Functions and classes must be defined at the top "
            "level of a module (no lambda, no nested function), and values must be picklable"
        ) from error
    return buffer.getvalue(), Names(_describe_main() if packer.names_main else None, packer.files)


def unpack(data: bytes | memoryview, names: Names | None = None) -> Any:
    """The value in a parcel. `names` is for the process that has to look for its modules."""
    return _Unpacker(io.BytesIO(data), names).load()


class _Packer(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=5)
        self.files: dict[str, str] = {}
        self.names_main = False

    def reducer_override(self, obj: Any) -> Any:
        """Pickle as ever; only note the source file of each function's or class's module."""
        if isinstance(obj, type | types.FunctionType):
            name = obj.__module__
            file = getattr(sys.modules.get(name), "__file__", None)
            if name in _MAIN_NAMES:
                self.names_main = True
            elif file is not None:
                self.files[name] = os.path.abspath(file)
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, names: Names | None) -> None:
        super().__init__(buffer)
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        if self._names is None:  # a parcel that came back: its names went out from here
            return super().find_class("__main__" if module in _MAIN_NAMES else module, name)
        found = _main_module(self._names.main) if module in _MAIN_NAMES else self._import(module)
        try:
            return functools.reduce(getattr, name.split("."), found)
        except AttributeError as error:
            raise AttributeError(
                f"{module} in a worker has no {name!r}: it must be defined at the top level of its file, and "
                "a module that changed after a worker imported it needs new workers"
            ) from error

    def _import(self, module: str) -> types.ModuleType:
        assert self._names is not None
        file = self._names.files.get(module)
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if file is None or not module.startswith(error.name or "\0"):
                raise
            return _load_file(module, file)
        other = getattr(found, "__file__", None)
        if file is None or other is None or os.path.realpath(other) == os.path.realpath(file):
            return found
        return _load_file(module, file)


def _load_file(name: str, file: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"no module {name!r}, and {file} cannot be loaded in its place", name=name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _describe_main() -> tuple[str, str]:
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return "module", spec.name
    if file is not None and os.path.exists(file):
        return "path", os.path.abspath(file)
    if sys.argv[:1] == ["-c"] and "-c" in sys.orig_argv[:-1]:
        return "code", sys.orig_argv[sys.orig_argv.index("-c") + 1]
    raise TypeError(
        "a function or class of an interactive session cannot be sent to another process: it has no source "
        "there. Put it in a file and import it"
    )


# ---- the main script, in the receiver ----

_main_is_loading = False
_loaded_main: types.ModuleType | None = None


def main_is_loading() -> bool:
    """Is this process a receiver that runs the main script only for its definitions?"""
    return _main_is_loading


def _main_module(main: tuple[str, str] | None) -> types.ModuleType:
    """The sender's main script, run in this process once, up to its first use of workers."""
    global _main_is_loading, _loaded_main
    if _loaded_main is not None:
        return _loaded_main
    if main is None:
        raise ModuleNotFoundError("the sender's main script is not known here", name="__main__")
    module, source, file = _main_source(*main)
    tree = ast.parse(source, file)
    before = sys.modules["__main__"]
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    _main_is_loading = True
    try:
        exec(compile(tree, file, "exec"), module.__dict__)
    except MainReachedWorkers as reached:
        frame = reached.__traceback__ and reached.__traceback__.tb_next  # below this one: the script's
        exec(compile(_definitions_after(frame.tb_lineno if frame else 0, tree), file, "exec"), module.__dict__)
    except BaseException:
        sys.modules["__main__"] = before
        raise
    finally:
        _main_is_loading = False
    _loaded_main = module
    return module


def _definitions_after(line: int, tree: ast.Module) -> ast.Module:
    """Of the part of a script that is not run, what only defines: later runs may name it."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    rest: list[ast.stmt] = [node for node in tree.body if node.lineno > line and isinstance(node, kinds)]
    return ast.Module(rest, type_ignores=[])


def _main_source(kind: str, value: str) -> tuple[types.ModuleType, str | bytes, str]:
    """An empty module for the script, its source, and the name of its file."""
    module = types.ModuleType("__mp_main__")
    if kind == "code":
        return module, value, "<string>"
    if kind == "path":
        module.__file__ = value
        with open(value, "rb") as source:
            return module, source.read(), value
    spec = importlib.util.find_spec(value)
    text = spec.loader.get_source(value) if spec and spec.loader else None  # type: ignore[attr-defined]
    if spec is None or text is None:
        raise ModuleNotFoundError(f"no source of module {value!r}", name=value)
    module.__spec__, module.__package__, module.__file__ = spec, spec.parent, spec.origin
    return module, text, spec.origin or value
