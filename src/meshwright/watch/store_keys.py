"""``StoreKeys``: the keys of one run, or of one job, in a ``dist.Store``. Their values are JSON."""

from __future__ import annotations

import json
from typing import Any


class StoreKeys:
    """Reads and writes the keys below the prefix ``meshwright/<name>/``.

    Args:
        store: a ``dist.Store``.
        name: of the run or job. It must be equal on every rank, and unique in the store.
    """

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name = store, name

    def _key(self, key: str) -> str:
        return f"meshwright/{self._name}/{key}"

    def _set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), json.dumps(value))

    def _get(self, key: str) -> Any:
        """The value of a key; None if the key does not exist. (``dist.Store.get`` would wait until the key exists.)"""
        key = self._key(key)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


__all__ = ["StoreKeys"]
