"""``pack`` and ``unpack``: values as bytes, to send them to a worker process and back.

Functions and classes are pickled by the name of their module if a worker can import it. Those of the main script, of a notebook
or another interactive session, and of a file that was loaded by its path are pickled with their code (cloudpickle). The script
does not run again in a worker, so it needs no main guard, and lambdas and nested functions can be sent.

Tensors are pickled as bytes: no memory is shared, and no descriptor can leak. A view is sent with its complete storage.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import closing
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle


def pack(value: object) -> bytes:
    """Pickles a value. Raises TypeError if the value cannot be pickled."""
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
    """The value of bytes from ``pack``."""
    return _Unpacker(io.BytesIO(data)).load()


class Packer(cloudpickle.Pickler):
    """Pickles values into a buffer, with functions and classes in a form that a worker can load. Close it after use."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=5)
        self._by_value: list[Any] = []  # modules that a worker cannot import

    def close(self) -> None:
        """Unregisters the modules that were registered with cloudpickle."""
        for module in self._by_value:
            cloudpickle.unregister_pickle_by_value(module)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType):
            module = sys.modules.get(obj.__module__)
            if module is not None and module not in self._by_value and not _is_importable(obj.__module__):
                cloudpickle.register_pickle_by_value(module)
                self._by_value.append(module)
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            # cloudpickle knows plain modules only. It takes along `torch.classes` if a function says `dataset.classes`.
            return importlib.import_module, (obj.__name__,)
        if type(obj) is functools.cached_property:
            return _cached_property, (obj.func, obj.attrname)
        if isinstance(obj, _LruCache) and not _is_found(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


def _cached_property(func: Callable[[Any], Any], name: str | None) -> Any:
    """Makes a ``cached_property`` anew.

    In Python 3.11 it has a lock, which cannot be pickled. ``__set_name__`` is called here, as a class that cloudpickle rebuilds
    does not call it.
    """
    property_ = functools.cached_property(func)
    if name is not None:
        property_.__set_name__(object, name)
    return property_


_LruCache = type(functools.cache(int))


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """Makes a ``functools.lru_cache`` of a function anew, and empty. Pickle itself takes only its name."""
    return functools.lru_cache(**parameters)(function)


def _is_found(function: Any) -> bool:
    """Whether a worker finds a function by the name of its module."""
    name = function.__module__
    return (
        name != "__main__" and name in sys.modules and _is_importable(name) and "<locals>" not in function.__qualname__
    )


def _is_importable(name: str) -> bool:
    """Whether an import of this name in a worker finds the file of this process's module.

    True for the main script: cloudpickle itself pickles its functions and classes by value.
    """
    file = getattr(sys.modules[name], "__file__", None)
    return name == "__main__" or file is None or _found_file(name) == os.path.realpath(file)


@functools.lru_cache(maxsize=4096)
def _found_file(name: str) -> str | None:
    """The file that an import of this name finds in a process that has not imported it."""
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return os.path.realpath(spec.origin) if spec.origin else None
    return None


class _Unpacker(pickle.Unpickler):
    """Adds the classes of the sender's main script to this process's ``__main__``.

    Plain pickle looks for them there if ranks send each other objects (``dist.all_gather_object``).
    """

    def find_class(self, module: str, name: str) -> Any:
        cls = super().find_class(module, name)
        is_maker = module.startswith("cloudpickle") and name == "_make_skeleton_class"
        return functools.partial(_class_of_main, cls) if is_maker else cls


def _class_of_main(make: Callable[..., type], *args: Any) -> type:
    """Makes a class with cloudpickle's function, and adds it to ``__main__`` if it is a class of the main script."""
    cls = make(*args)
    main = sys.modules["__main__"]
    is_top_level = cls.__module__ == "__main__" and cls.__qualname__ == cls.__name__
    if is_top_level and not hasattr(main, cls.__name__):
        setattr(main, cls.__name__, cls)
    return cls
