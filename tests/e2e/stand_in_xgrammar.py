"""What `pack.py` puts in xgrammar's place: 45 MB that a server without grammars only imports.

sglang 0.5.17 takes names from it for pydantic models; every name is an empty model here, in the
package and in whatever module of it is asked for.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

import pydantic


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        model = type(name, (pydantic.BaseModel,), {})
        setattr(self, name, model)
        return model


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("xgrammar."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
sys.modules[__name__].__class__ = _Module
