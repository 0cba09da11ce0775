"""Values as bytes, for a worker process, or the answer of one.

Functions and classes travel by the name of their module if a worker can import it. Those of the main script, of a notebook
or another interactive session, and of a file that was loaded by its path travel with their code (cloudpickle): the script
does not run again, so it needs no main guard, and lambdas and nested functions can be sent.

Tensors travel as plain bytes: nothing is shared and no descriptor can leak. A view carries its whole storage.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import closing
from types import FunctionType
from typing import Any

import cloudpickle


def pack(value: object) -> bytes:
    """Pickles a value. Raises TypeError for what cannot be pickled."""
    buffer = io.BytesIO()
    try:
        with closing(Packer(buffer)) as packer:
            packer.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"cannot be sent to another process: {error}. A function of the main script takes along what it names: no "
            "locks, open files or handles may be among it"
        ) from error
    return buffer.getvalue()


def unpack(data: bytes | memoryview) -> Any:
    """The value in a payload."""
    return _Unpacker(io.BytesIO(data)).load()


class Packer(cloudpickle.Pickler):
    """Writes values to a buffer, functions and classes as a worker can take them. To be closed."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=5)
        self._by_value: list[Any] = []  # modules that a worker cannot import

    def close(self) -> None:
        """Nothing more is written."""
        for module in self._by_value:
            cloudpickle.unregister_pickle_by_value(module)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType):
            module = sys.modules.get(obj.__module__)
            if module is not None and module not in self._by_value and not _is_importable(obj.__module__):
                cloudpickle.register_pickle_by_value(module)
                self._by_value.append(module)
        if type(obj) is functools.cached_property:
            return _cached_property, (obj.func, obj.attrname)
        return super().reducer_override(obj)


def _cached_property(func: Callable[[Any], Any], name: str | None) -> Any:
    """Made again: in Python 3.11 one has a lock, and a class that is put together later does not tell it its name."""
    made = functools.cached_property(func)
    if name is not None:
        made.__set_name__(object, name)
    return made


def _is_importable(name: str) -> bool:
    """Whether an import of this name finds the module that has it here; of the main script, cloudpickle knows."""
    file = getattr(sys.modules[name], "__file__", None)
    return name == "__main__" or file is None or _found_file(name) == os.path.realpath(file)


@functools.lru_cache(maxsize=4096)
def _found_file(name: str) -> str | None:
    """The file that an import of this name would find, had nothing been imported."""
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return os.path.realpath(spec.origin) if spec.origin else None
    return None


class _Unpacker(pickle.Unpickler):
    """Puts the classes of the sender's main script into this process's ``__main__``: there plain pickle looks for them, if
    ranks send each other objects (``dist.all_gather_object``)."""

    def find_class(self, module: str, name: str) -> Any:
        cls = super().find_class(module, name)
        is_maker = module.startswith("cloudpickle") and name == "_make_skeleton_class"
        return functools.partial(_class_of_main, cls) if is_maker else cls


def _class_of_main(make: Callable[..., type], *args: Any) -> type:
    made = make(*args)
    main = sys.modules["__main__"]
    if made.__module__ == "__main__" and made.__qualname__ == made.__name__ and not hasattr(main, made.__name__):
        setattr(main, made.__name__, made)
    return made
