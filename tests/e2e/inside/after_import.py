"""Run a function once a module has been imported, in every process of a server.

The plugin's start-up hook is a finder on `sys.meta_path` too. Whichever of the two is asked first
asks all the others, so this one must answer None while it is being asked back.
"""

from __future__ import annotations

import sys
import threading

_wanted: dict[str, list] = {}
_asking = threading.local()


class _Loader:
    def __init__(self, loader, callbacks):
        self._loader, self._callbacks = loader, callbacks

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        for callback in self._callbacks:
            callback(module)

    def __getattr__(self, name):
        return getattr(self._loader, name)


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name not in _wanted or getattr(_asking, "name", None) == name:
            return None
        _asking.name = name
        try:
            for finder in tuple(sys.meta_path):
                find_spec = None if finder is self else getattr(finder, "find_spec", None)
                spec = find_spec and find_spec(name, path, target)
                if spec:
                    spec.loader = _Loader(spec.loader, _wanted[name])
                    return spec
        finally:
            _asking.name = None
        return None


def after_import(name: str, callback) -> None:
    """Call `callback(module)` right after the first import of module `name`."""
    _wanted.setdefault(name, []).append(callback)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
