"""Block-FP8 linear layers for SM120/SM121 GPUs in sglang and sglang-kt.

Importing this package imports neither torch nor sglang; the names below are resolved on first use.
"""

__version__ = "0.1.0"

_LAZY = {
    "Sm120BlockFp8Linear": "sglang_kt_sm120.linear",
    "Sm120Fp8LinearMethod": "sglang_kt_sm120.method",
    "choose": "sglang_kt_sm120.select",
    "install": "sglang_kt_sm120.host",
}
__all__ = ["__version__", *sorted(_LAZY)]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
