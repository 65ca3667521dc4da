"""What `sglang_kt_sm120.pth` (and `.start`, Python 3.15) runs when an interpreter starts.

sglang-kt has no plugin loader and spawns its schedulers as fresh interpreters, so the only place
from which every process can be reached is interpreter start-up. This module therefore costs next
to nothing (`sys` and `os`, both already loaded): it puts a finder on `sys.meta_path` that stays
idle until sglang's block-FP8 modules are imported, and then hands over to `plugin`.
"""

import os
import sys

_QUANTIZATION = "sglang.srt.layers.quantization"
#: The modules that hold the seams; host.py says which name in each.
TARGETS = (
    f"{_QUANTIZATION}.fp8_utils",
    f"{_QUANTIZATION}.fp8",
    f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w8a8_fp8",
)
#: As env.FALSE, which is not imported here: start-up pays for every import.
OFF = ("0", "false", "no", "off")


class _Loader:
    """Runs the module with its own loader, then tells the plugin; the module sees only its own."""

    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _after_import(module)

    def __getattr__(self, name):
        return getattr(self._loader, name)


class _Finder:
    """Asks the other finders (editable installs have their own) and wraps the loader they give."""

    def find_spec(self, name, path=None, target=None):
        if name not in TARGETS:
            return None
        for finder in tuple(sys.meta_path):
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


def _after_import(module) -> None:
    try:
        from sglang_kt_sm120 import plugin

        plugin.after_import(module)
    except Exception as error:  # the host's import must go on whatever is wrong with us
        print(
            f"sglang-kt-sm120: could not start ({type(error).__name__}: {error}); "
            "sglang runs without it",
            file=sys.stderr,
        )


def armed() -> bool:
    """True where the finder waits in this interpreter."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def arm() -> None:
    """Put the finder in place, once, unless `SGLANG_KT_SM120_ENABLE` switches the plugin off."""
    if os.environ.get("SGLANG_KT_SM120_ENABLE", "").strip().lower() not in OFF and not armed():
        sys.meta_path.insert(0, _Finder())
