"""What a real host does with a block-FP8 layer: run inside the host, one process per scenario.

    .hosts/sglang-kt-0.6.1/bin/python tests/hosts/probe.py '{"capability": [12, 0]}'

prints one line, `MARK` and a JSON object; with `--serve` it answers one such line for each line it
reads, in a child forked after the slow imports that ask nothing about a GPU.

It builds a layer the way a model does: server arguments, sglang's own `ReplicatedLinear` with its
`Fp8LinearMethod`, a checkpoint's values, `process_weights_after_loading`, the layer's forward.
Nothing of this package is imported here; the plugin comes in by its own start-up hook, where a
scenario names a folder that holds it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import site
import sys
import time
import traceback
from pathlib import Path

MARK = "PROBE-RESULT "
#: What a scenario spends most of its time importing, and what asks nothing about a GPU.
PRELOADED = (
    "flashinfer.gemm",
    "torch._inductor.compile_fx",
    "openai",
    "compressed_tensors",
    "aiohttp",
    "IPython",
    "xgrammar",
    "starlette.responses",
    "gguf",
)
DEFAULTS = {
    "capability": [12, 0],
    "env": {},
    "plugin": None,  # a site folder that holds the installed plugin, start-up hook and all
    "deep_gemm": None,  # a key of stubs.DEEP_GEMM_REFUSALS
    "arguments": None,  # a command line for sglang's own ServerArgs, instead of layers[].backend
    "device": "cpu",
    "layers": [{}],
}
LAYER = {
    "backend": "auto",  # --fp8-gemm-backend
    "shape": [2112, 7168],
    "rows": 4,
    "block": [128, 128],  # None: a per-tensor FP8 checkpoint
    "load": True,  # False: only the constructor, which asks dispatch
    "apply": True,
    "seed": 0,
}


class _Log(logging.Handler):
    """Keeps what the plugin and sglang's FP8 modules say."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines: list[list[str]] = []

    def emit(self, record):
        self.lines.append([record.levelname, record.name, record.getMessage()])


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything prints goes to stderr
    if sys.argv[1:] != ["--serve"]:
        answers.write(f"{MARK}{json.dumps(run(json.loads(sys.argv[1])))}\n")
        return
    _preload()
    for line in sys.stdin:
        if os.fork():
            _, status = os.wait()
            if status:
                answers.write(f'{MARK}{{"died": {os.waitstatus_to_exitcode(status)}}}\n')
            answers.flush()
        else:
            answers.write(f"{MARK}{json.dumps(run(json.loads(line)))}\n")
            answers.flush()
            os._exit(0)
    os._exit(0)  # nothing to tidy up, and taking four thousand modules down takes seconds


def _preload() -> None:
    """Import what takes long and asks nothing about a GPU: three quarters of a scenario's time."""
    import stubs

    stubs.absent()
    for name in PRELOADED:
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    import transformers

    transformers.AutoProcessor  # noqa: B018 (it loads lazily)


def run(scenario: dict) -> dict:
    """Play one scenario in this process and return what was observed."""
    scenario = DEFAULTS | scenario
    os.environ.update(scenario["env"])
    started = time.monotonic()
    if scenario["plugin"]:
        site.addsitedir(scenario["plugin"])  # the real processing of `.pth` files
    import stubs

    log = _Log()
    for name in ("sglang_kt_sm120", "sglang.srt.layers.quantization"):
        logger = logging.getLogger(name)
        logger.addHandler(log)
        logger.setLevel(logging.INFO)

    stubs.put_on(tuple(scenario["capability"]), scenario["deep_gemm"])
    from sglang.srt.layers.quantization import fp8, fp8_utils

    stubs.after_import()
    stubs.one_rank()
    result = {"host": _host(fp8_utils), "sees": _sees(fp8_utils)}
    result["wrapped"] = {
        "dispatch": hasattr(fp8_utils.dispatch_w8a8_block_fp8_linear, "__wrapped__"),
        "load": hasattr(fp8.Fp8LinearMethod.process_weights_after_loading, "__wrapped__"),
    }
    if scenario["arguments"]:
        stubs.nvidia_smi()
        result["arguments"] = _configure(fp8_utils, command=scenario["arguments"])
    result["layers"] = [
        _layer(LAYER | layer, scenario, fp8, fp8_utils) for layer in scenario["layers"]
    ]
    result["cutlass"] = _offered()
    result["log"] = log.lines
    result["modules"] = sorted({"deep_gemm", "sglang_kt_sm120"} & set(sys.modules))
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def _host(fp8_utils) -> dict:
    """Which files these are: the report shows that the parts are real."""
    import torch

    return {
        "sglang-kt": importlib.metadata.version("sglang-kt"),
        "flashinfer": importlib.metadata.version("flashinfer-python"),
        "torch": torch.__version__,
        "fp8_utils": fp8_utils.__file__,
    }


def _sees(fp8_utils) -> dict:
    """What the host's own functions answer about the card."""
    from sglang.srt import utils
    from sglang.srt.layers import deep_gemm_wrapper

    names = ("is_blackwell", "is_sm90", "is_sm100", "is_sm120")
    sees = {name: bool(getattr(utils, f"{name}_supported")()) for name in names}
    sees["get_device_sm"] = utils.get_device_sm()
    sees["is_flashinfer_available"] = bool(fp8_utils.is_flashinfer_available())
    sees["ENABLE_JIT_DEEPGEMM"] = bool(deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM)
    return sees


def _configure(fp8_utils, command: list[str] | None = None, backend: str = "auto") -> str:
    """Do what a scheduler does with its server arguments before it builds a model.

    `command` goes through the host's own parser and checks; without one, sglang's "dummy" model
    path gives a ServerArgs that skips them. Returns the backend that was asked for.
    """
    from sglang.srt import server_args

    if command:
        arguments = server_args.prepare_server_args(command)
    else:
        arguments = server_args.ServerArgs(model_path="dummy", fp8_gemm_runner_backend=backend)
    server_args.set_global_server_args_for_scheduler(arguments)
    fp8_utils.initialize_fp8_gemm_config(arguments)
    return arguments.fp8_gemm_runner_backend


def _layer(layer: dict, scenario: dict, fp8, fp8_utils) -> dict:
    import torch

    result = {"asked": layer}
    if not scenario["arguments"]:
        _configure(fp8_utils, backend=layer["backend"])
    try:
        method, module = _load(layer, scenario["device"], fp8, result, fp8_utils)
    except Exception as error:
        return result | {"error": _error(error), "stage": "load"}
    result["dispatch"] = _describe(method.w8a8_block_fp8_linear, fp8_utils)
    if module is not None and layer["block"]:
        result["weight_scale"] = str(module.weight_scale_inv.dtype)
    if module is None or not layer["apply"]:
        return result
    k = layer["shape"][1]
    generator = torch.Generator().manual_seed(layer["seed"])
    x = torch.randn(layer["rows"], k, generator=generator).bfloat16().to(scenario["device"])
    before = _copies(module)
    try:
        with torch.inference_mode():
            output, _ = module(x)
    except Exception as error:
        return result | {"error": _error(error), "stage": "apply"}
    result["output"] = _compare(output, x, *before)
    return result


def _load(layer: dict, device: str, fp8, result: dict, fp8_utils):
    """Construct, fill and post-process one layer as a model loader does.

    `result["constructed"]` keeps what dispatch answered, before the layer was loaded.
    """
    import torch

    n, k = layer["shape"]

    class Config(fp8.Fp8Config):
        """sglang's own, without the import of its MoE layers, which want CUDA libraries."""

        def get_quant_method(self, layer, prefix):
            return fp8.Fp8LinearMethod(self)

    config = Config(
        is_checkpoint_fp8_serialized=True,
        activation_scheme="dynamic",
        weight_block_size=layer["block"],
    )
    if not layer["load"]:
        method = fp8.Fp8LinearMethod(config)
        result["constructed"] = _describe(method.w8a8_block_fp8_linear, fp8_utils)
        return method, None
    from sglang.srt.layers.linear import ReplicatedLinear

    module = ReplicatedLinear(k, n, bias=False, params_dtype=torch.bfloat16, quant_config=config)
    method = module.quant_method
    result["constructed"] = _describe(method.w8a8_block_fp8_linear, fp8_utils)
    module.to(device)
    generator = torch.Generator().manual_seed(layer["seed"] + 1)
    values = torch.randn(n, k, generator=generator).clamp(-4, 4) * 100
    module.weight.data.copy_(values.to(torch.float8_e4m3fn))
    if layer["block"]:
        scale = module.weight_scale_inv
        scale.data.copy_(torch.rand(scale.shape, generator=generator) * 1e-4 + 1e-5)
    else:
        module.weight_scale.data.fill_(1e-4)
    method.process_weights_after_loading(module)
    return method, module


def _offered() -> dict | None:
    """What the plugin took of the host's CUTLASS, where the plugin is here and loaded that part."""
    cutlass = sys.modules.get("sglang_kt_sm120.backends.cutlass")
    if cutlass is None:
        return None
    product = cutlass.libraries._offered.get("sglang_jit")
    return {
        "default": cutlass._host_kernel,
        "jit": None if product is None else f"{product.__module__}.{product.__name__}",
    }


def _copies(module):
    """The checkpoint's values, before anything the layer does at run time can touch them."""
    return module.weight.data.clone(), module.weight_scale_inv.data.clone()


def _describe(function, fp8_utils) -> dict:
    stock = [name for name, value in vars(fp8_utils).items() if value is function]
    return {
        "name": getattr(function, "__name__", repr(function)),
        "module": getattr(function, "__module__", ""),
        "type": f"{type(function).__module__}.{type(function).__name__}",
        "stock": stock[0] if stock else None,
        "ours": type(function).__name__ == "Sm120BlockFp8Linear"
        and type(function).__module__ == "sglang_kt_sm120.linear",
    }


def _error(error: Exception) -> dict:
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "type": type(error).__name__,
        "module": type(error).__module__,
        "message": str(error),
        "frames": [
            {"file": step.filename, "line": step.lineno, "function": step.name, "code": step.line}
            for step in frames
        ],
    }


def _compare(output, x, weight, scale) -> dict:
    """Relative error of `output` in the 2-norm, against two products in float64.

    `exact` uses the activation as it is; `quantised` the e4m3 codes and scales that the rule of
    block FP8 gives, so that only the kernel's own arithmetic is left.
    """
    import torch

    n, k = weight.shape
    blocks = scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    dense = weight.double() * blocks
    groups = x.float().unflatten(-1, (-1, 128))
    factor = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10)
    factor = factor / torch.full_like(factor, 448)  # CUDA takes a number's rounded reciprocal
    codes = (groups * (1 / factor)).clamp(-448, 448).to(torch.float8_e4m3fn)
    quantised = (codes.double() * factor.double()).flatten(-2)
    answers = {"exact": x.double() @ dense.T, "quantised": quantised @ dense.T}
    errors = {
        name: ((output.double() - answer).norm() / answer.norm()).item()
        for name, answer in answers.items()
    }
    return {"shape": list(output.shape), "dtype": str(output.dtype), **errors}


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
