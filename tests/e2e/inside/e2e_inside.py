"""What the end-to-end tests put inside every process of a server, through a `.pth` line.

`E2E_PERSONALITY=sm120` makes a Hopper look like SM120 to sglang's block-FP8 dispatch and to
FlashInfer's backend check, and to nothing else: were the whole process told 12.0, the host's other
JIT kernels would be built for sm_120a and not load. The plugin has its own variable for that.

`E2E_LAUNCH_LOG=FOLDER` counts, per process, what multiplied block-FP8 weights: calls of the
plugin's backends (with the Triton `arch` they were given, M, N, K, and into how many ranges they
split K), calls of sglang's own linear functions, and launches of Triton kernels by name.
FOLDER/PID.json holds the counts.
"""

from __future__ import annotations

import atexit
import collections
import functools
import json
import os
import sys
import threading
import time

from after_import import after_import

FP8_UTILS = "sglang.srt.layers.quantization.fp8_utils"
STOCK = (
    "triton_w8a8_block_fp8_linear",
    "cutlass_w8a8_block_fp8_linear_with_fallback",
    "deepgemm_w8a8_block_fp8_linear_with_fallback",
    "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback",
)


def put_on_personality(fp8_utils) -> None:
    import flashinfer.gemm
    import flashinfer.utils

    fp8_utils.is_blackwell_supported = fp8_utils.is_sm120_supported = lambda *args: True
    fp8_utils.is_sm90_supported = fp8_utils.is_sm100_supported = lambda *args: False
    fp8_utils.gemm_fp8_nt_groupwise = flashinfer.gemm.gemm_fp8_nt_groupwise
    flashinfer.utils.get_compute_capability = lambda device: (12, 0)


class LaunchLog:
    """Counts in memory; a thread writes them, since servers are killed rather than ended."""

    def __init__(self, folder: str):
        self.folder = folder
        self.calls = collections.Counter()
        self.kernels = collections.Counter()
        self.written = None
        after_import(FP8_UTILS, self.watch_stock)
        for name in ("triton", "reference", "cutlass"):
            after_import(f"sglang_kt_sm120.backends.{name}", self.watch_backend)
        after_import("triton.knobs", self.watch_kernels)
        atexit.register(self.write)

    def watch_stock(self, fp8_utils) -> None:
        """Replace sglang's functions before fp8.py imports them, so identity checks still hold."""
        self.start()
        for name in STOCK:
            function = getattr(fp8_utils, name, None)
            if function is not None:
                setattr(fp8_utils, name, self.counted(function, "stock", name))

    def counted(self, function, kind: str, name: str):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            x = kwargs["input"] if "input" in kwargs else args[0]
            self.calls[kind, name, "", x.shape[:-1].numel(), self.capturing(), None, None, 0] += 1
            return function(*args, **kwargs)

        return wrapper

    def watch_backend(self, module) -> None:
        """Count the calls of a backend, whether it is run at once or planned and then called."""
        one = "plan" if hasattr(module, "plan") else "run"
        original = getattr(module, one)

        def count(x, arch, n, k, config):
            ranges = max(getattr(config, "splits", 0), getattr(config, "split_order", 0))
            row = ("plugin", module.NAME, arch or "", x.shape[0], self.capturing(), n, k, ranges)
            self.calls[row] += 1

        @functools.wraps(original)
        def run(x, weight, weight_scale, x_scale, out_dtype, config, *args, arch=None, **options):
            count(x, arch, *weight.shape, config)
            rest = (weight, weight_scale, x_scale, out_dtype, config, *args)
            return original(x, *rest, arch=arch, **options)

        @functools.wraps(original)
        def plan(config, n, k, *args, arch=None, **options):
            call = original(config, n, k, *args, arch=arch, **options)

            def counted(x, *rest):
                count(x, arch, n, k, config)
                return call(x, *rest)

            return counted

        setattr(module, one, plan if one == "plan" else run)

    def watch_kernels(self, knobs) -> None:
        def entered(metadata):
            self.kernels[metadata.get()["name"]] += 1

        knobs.runtime.launch_enter_hook.add(entered)

    @staticmethod
    def capturing() -> bool:
        torch = sys.modules["torch"]
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    @staticmethod
    def dynamo() -> dict[str, int]:
        """Count what torch.compile traced: graphs, and breaks in them."""
        utils = sys.modules.get("torch._dynamo.utils")
        counters = getattr(utils, "counters", {})
        return {
            "graphs": counters.get("stats", {}).get("unique_graphs", 0),
            "breaks": sum(counters.get("graph_break", {}).values()),
        }

    def start(self) -> None:
        threading.Thread(target=self.keep_writing, daemon=True).start()

    def keep_writing(self) -> None:
        while True:
            time.sleep(0.3)
            self.write()

    def write(self) -> None:
        keys = ("by", "name", "arch", "m", "capturing", "n", "k", "ranges")
        calls = [dict(zip(keys, key, strict=True), count=n) for key, n in list(self.calls.items())]
        text = json.dumps({"calls": calls, "kernels": dict(self.kernels), "dynamo": self.dynamo()})
        if (calls or self.kernels) and text != self.written:
            path = os.path.join(self.folder, f"{os.getpid()}.json")
            with open(f"{path}.new", "w") as file:
                file.write(text)
            os.replace(f"{path}.new", path)
            self.written = text


if os.environ.get("E2E_PERSONALITY") == "sm120":
    after_import(FP8_UTILS, put_on_personality)
if os.environ.get("E2E_LAUNCH_LOG"):
    LaunchLog(os.environ["E2E_LAUNCH_LOG"])
