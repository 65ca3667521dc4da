"""Every environment variable of this package: name, type, default, meaning.

The CLI (`sglang-kt-sm120 env`) and docs/environment.md are made from `VARIABLES`; only `_startup`,
which may import nothing, reads one of them itself.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger("sglang_kt_sm120")
PREFIX = "SGLANG_KT_SM120_"

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
#: What `--fp8-gemm-backend` can name in any supported host.
REQUESTS = (
    "auto",
    "triton",
    "flashinfer_trtllm",
    "flashinfer_cutlass",
    "flashinfer_cutedsl",
    "flashinfer_deepgemm",
    "cutlass",
    "deep_gemm",
)

#: What `DISABLED_BACKENDS` can name: backends, and the kernels of backend cutlass (limits.py).
CAN_BE_DISABLED = ("triton", "cutlass", "reference", "sgl_kernel", "sglang_jit", "flashinfer")

_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    `parse` turns the text into a value or raises ValueError; `allowed` is what a user may write.
    """

    name: str
    default: str
    allowed: str
    help: str
    parse: Callable[[str], Any]

    def get(self) -> Any:
        """Return the parsed value; an unknown value gives one warning and the default."""
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.parse(self.default)
        try:
            return self.parse(text)
        except ValueError:
            if (self.name, text) not in _warned:
                _warned.add((self.name, text))
                logger.warning(
                    "%s=%r is not understood; allowed: %s. Using the default, %r.",
                    self.name, text, self.allowed, self.default,
                )  # fmt: skip
            return self.parse(self.default)


def _flag(text: str) -> bool:
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise ValueError(text)


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(text)
        return text.lower()

    return parse


def _names(allowed: tuple[str, ...]) -> Callable[[str], frozenset[str]]:
    def parse(text: str) -> frozenset[str]:
        names = frozenset(name.strip().lower() for name in text.split(",") if name.strip())
        if not names <= frozenset(allowed):
            raise ValueError(text)
        return names

    return parse


def _capability(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    major, dot, minor = text.partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise ValueError(text)
    return int(major), int(minor)


def _variable(suffix: str, default: str, allowed: str, help: str, parse: Callable) -> Variable:
    return Variable(PREFIX + suffix, default, allowed, help, parse)


ENABLE = _variable(
    "ENABLE", "1", "0 or 1",
    "0 leaves sglang exactly as it is: no hook, no wrapper.", _flag,
)  # fmt: skip
REPLACE = _variable(
    "REPLACE", "auto,triton,flashinfer_trtllm", "a comma-separated list of " + ", ".join(REQUESTS),
    "Which requests (--fp8-gemm-backend, or the variables of old releases) this plugin serves on "
    "SM12x; any other request stays with sglang.", _names(REQUESTS),
)  # fmt: skip
STRICT = _variable(
    "STRICT", "0", "0 or 1",
    "1 refuses an explicit flashinfer_trtllm request on SM12x when the model loads, instead of "
    "serving it with a warning.", _flag,
)  # fmt: skip
BACKEND = _variable(
    "BACKEND", "auto", "auto, triton, cutlass, reference",
    "Force one backend for every shape; one that cannot serve a layer stops the load with every "
    "reason.", _one_of("auto", "triton", "cutlass", "reference"),
)  # fmt: skip
DISABLED_BACKENDS = _variable(
    "DISABLED_BACKENDS", "", "a comma-separated list of " + ", ".join(CAN_BE_DISABLED),
    "Backends, or single kernels of cutlass, that never serve; a layer that none is left for stops "
    "the load with every reason.", _names(CAN_BE_DISABLED),
)  # fmt: skip
PDL = _variable(
    "PDL", "1", "0 or 1",
    "0 launches decode kernels without programmatic dependent launch (their weights then start to "
    "load only after the previous kernel has ended).", _flag,
)  # fmt: skip
MMA = _variable(
    "MMA", "auto", "auto, plain, block_scale",
    "Tensor-core instruction of the prefill kernel: plain FP8 (RTX PRO, GB10) or unit-scale "
    "block-scaled FP8 (GeForce, where plain FP8 runs at half rate); auto decides by GPU.",
    _one_of("auto", "plain", "block_scale"),
)  # fmt: skip
CONFIG_DIR = _variable(
    "CONFIG_DIR", "~/.cache/sglang-kt-sm120", "a folder",
    "Where `tune` writes the tuned table of this machine's GPU, and where it is looked for first.",
    lambda text: Path(text).expanduser(),
)  # fmt: skip
TEST_CAPABILITY = _variable(
    "TEST_CAPABILITY", "", "empty, or a compute capability such as 12.0",
    "For tests only: the compute capability that this plugin (and nothing else) believes every "
    "device has. Without a GPU the reference backend then serves, and `explain` says so; "
    "`explain --gpu` asks about the named card as it is.", _capability,
)  # fmt: skip

VARIABLES = (
    ENABLE, REPLACE, STRICT, BACKEND, DISABLED_BACKENDS, PDL, MMA, CONFIG_DIR, TEST_CAPABILITY,
)  # fmt: skip


def misread() -> dict[str, tuple[str, str]]:
    """Return what is wrong with the variables that are set: name -> (what, what to do).

    A value that is not understood (serving then takes the default), and a name of our prefix that
    is no variable of ours.
    """
    wrong = {}
    known = {variable.name: variable for variable in VARIABLES}
    for name in sorted(name for name in os.environ if name.startswith(PREFIX)):
        text = os.environ[name].strip()
        if name not in known:
            endings = [known_name.removeprefix(PREFIX) for known_name in known]
            near = difflib.get_close_matches(name.removeprefix(PREFIX), endings, 1)
            fix = f"did you mean {PREFIX}{near[0]}?" if near else "unset it"
            wrong[name] = "no such variable", fix
        elif text:
            try:
                known[name].parse(text)
            except ValueError:
                wrong[name] = f"{text!r} is not understood", f"allowed: {known[name].allowed}"
    return wrong
