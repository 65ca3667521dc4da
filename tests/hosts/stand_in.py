"""The start of an interpreter that is to run a real command of a host without a GPU.

Brought in by a `.pth` line, so that the command itself is the real one: sglang's, or this project's
on a host. The machine that stubs.py presents ends at the first thing that only a GPU's driver can
do, `torch.cuda.set_device` (on a machine with a GPU too).
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))

import probe
import released_stubs
import stubs

#: Imported by sglang's entry points, absent here, and without a part in what is looked at.
UNTOUCHED = ("uvloop", "msgspec", "setproctitle", "zmq", "cuda", "outlines", "llguidance",
             "msgpack", "datasets", "pandas", "IPython", "watchfiles", "prometheus_client",
             "interegular", "modelscope", "blobfile", "decord", "openai_harmony", "anthropic",
             "timm")  # fmt: skip
END = "torch.cuda.set_device: the stand-in GPU ends here"
FP8_UTILS = "sglang.srt.layers.quantization.fp8_utils"


def present() -> None:
    """Present a GPU of capability 12.0 to this process."""
    released_stubs.before_import()
    stubs.put_on((12, 0))
    import transformers

    transformers.AutoProcessor  # noqa: B018 (it loads lazily, and must not see the empty modules)
    released_stubs.absent()
    released_stubs.same_capability()
    stubs.nvidia_smi()
    sys.modules["torch"].cuda.set_device = _end
    sys.meta_path.append(stubs._Finder(UNTOUCHED, _fill))


class _Waiting:
    """First on `sys.meta_path`: presents the machine when sglang is about to be imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "sglang":
            sys.meta_path.remove(self)
            present()


def present_to_sglang() -> None:
    """As `present`, in those processes only that import sglang, and not before."""
    sys.meta_path.insert(0, _Waiting())


def report_at_exit() -> None:
    """On the way out, say what sglang's dispatch is in this process, and what it answers now."""
    atexit.register(_report)


def _end(device) -> None:
    raise RuntimeError(END)


def _fill(module) -> None:
    if module.__name__ == "uvloop":  # sglang makes it asyncio's, which checks the type
        module.EventLoopPolicy = asyncio.DefaultEventLoopPolicy


def _report() -> None:
    """Print `probe.MARK` and a JSON object: the process, the two ways in, and the answer."""
    fp8_utils = sys.modules.get(FP8_UTILS)
    dispatch = getattr(fp8_utils, "dispatch_w8a8_block_fp8_linear", None)
    loader = sys.modules.get("sglang.srt.plugins")
    said = {
        "command": sys.argv[0],
        "armed": "sglang_kt_sm120._startup" in sys.modules,
        "wrapped": hasattr(dispatch, "__wrapped__"),
        "twice": hasattr(getattr(dispatch, "__wrapped__", None), "__wrapped__"),
        "loader_ran": bool(loader is not None and loader._plugins_loaded),
        "configured": str(getattr(fp8_utils, "FP8_GEMM_RUNNER_BACKEND", None)),
    }
    if dispatch is not None:
        answers = [dispatch(), dispatch()]  # as two layers would ask
        said["answers"] = [f"{type(a).__module__}.{type(a).__name__}" for a in answers]
    os.write(1, f"\n{probe.MARK}{json.dumps(said)}\n".encode())
