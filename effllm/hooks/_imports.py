"""Calls a hook after the import of its module, or at once if the module is already imported.

A module may be partly imported when its hook is added.  For example, ``from transformers import Trainer`` imports
torch, and torch starts effllm, during the import of transformers.  Then the hook is called at the end of the import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Hook = Callable[[ModuleType], None]

_waiting_hooks: dict[str, list[Hook]] = {}  # name of a module that is not yet imported -> its hooks


def when_imported(name: str, hook: Hook) -> None:
    """Call ``hook`` with the module ``name`` after its code has run; the hook must not raise."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        hook(module)
        return
    _waiting_hooks.setdefault(name, []).append(hook)
    if module is not None and spec is not None:
        _watch_import(spec)
    elif FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)


def _call_hooks(name: str) -> None:
    module = sys.modules.get(name)
    for hook in _waiting_hooks.pop(name, []):
        if module is not None:
            hook(module)


class _Finder:
    """Finds modules through the other finders, and calls the hooks of a module after its code has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _waiting_hooks:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                _wrap_loader(spec)
                return spec
        return None


FINDER: Any = _Finder()


def _wrap_loader(spec: ModuleSpec) -> None:
    """Wrap a module's loader for one call, and call the hooks after this call."""
    loader: Any = spec.loader
    run = getattr(loader, "exec_module", None)
    if run is None:
        return

    def exec_module(module: ModuleType) -> None:
        if module.__name__ == spec.name:  # a loader may load several modules
            del loader.exec_module
        run(module)
        if module.__name__ == spec.name:
            _call_hooks(spec.name)

    loader.exec_module = exec_module


class _WatchedSpec(ModuleSpec):
    """The spec of a partly imported module; the import system resets `_initializing` at the end of the import."""

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__.get("_initializing", False))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        if not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            _call_hooks(self.name)


def _watch_import(spec: ModuleSpec) -> None:
    if type(spec) is ModuleSpec:  # the class of another spec cannot be replaced
        spec.__class__ = _WatchedSpec
