"""What one released host does with block FP8, alone and with the plugin: run inside the host.

    .hosts/released/sglang-0.5.17/bin/python tests/hosts/contract.py --serve

answers one line (`probe.MARK` and a JSON object) for each scenario it reads, each in a child forked
after the imports that ask nothing about a GPU. probe.py builds whole layers of the two hosts of the
demo; here are the parts that every release since sglang 0.5.5 has: `Fp8LinearMethod` and
`CompressedTensorsW8A8Fp8`, constructed, filled, loaded and applied as sglang's layers do.

Where the plugin has wrapped dispatch, sglang's own answer is asked of the wrapped function itself,
in the same process: what the host would have returned at that very moment.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import logging
import multiprocessing
import os
import re
import site
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import probe
import released_stubs

VARIABLES = (
    "SGLANG_ENABLE_FLASHINFER_FP8_GEMM",
    "SGLANG_ENABLE_FLASHINFER_GEMM",
    "SGLANG_SUPPORT_CUTLASS_BLOCK_FP8",
)
#: What of sglang's own can be called without a GPU: it refuses before it touches one.
CRASHES = re.compile("deepgemm_w8a8|flashinfer_gemm")
SHAPE, ROWS, BLOCK = (320, 512), 5, [128, 128]
#: Explicit choices that the plugin answers by default; "auto" is asked for anyway.
OURS = ("triton", "flashinfer_trtllm")
DEFAULTS = {
    "capability": [12, 0],
    "env": {},
    "plugin": None,  # a site folder that holds the installed plugin
    "deep_gemm": None,  # a key of stubs.DEEP_GEMM_REFUSALS: importable and raising
    "initialise": True,  # False: a process that never configures its FP8 backend
    "loader": False,  # True: run sglang's own plugin loader, where a scheduler does
    "arguments": {},  # further server arguments
    "path": [],  # folders of this release, before those of the interpreter
    "asks": [{}],
}
ASK = {
    "backend": "auto",  # --fp8-gemm-backend
    "method": "fp8",  # or compressed-tensors
    "block": BLOCK,  # None: a per-tensor checkpoint, which old releases ask dispatch about too
    "load": True,  # False: only what dispatch answers; "crash": where stock is known to crash
    "requant": False,  # what sglang 0.5.5's DeepSeek loader does to weights before they are loaded
}


def main() -> None:
    if sys.argv[1] == "--spawn":
        spawned = multiprocessing.get_context("spawn").Process(target=serve, args=sys.argv[2:])
        spawned.start()
        spawned.join()
    else:
        serve()


def serve(scenarios: str | None = None) -> None:
    """Answer each scenario of a JSON list, or each line of stdin, in a forked child."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    released_stubs.before_import()
    probe._preload()
    for name in ("torch.distributed", "transformers.generation", "fastapi", "uvicorn"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.disable()  # a child lives for seconds, and collecting over so many modules takes long
    for scenario in json.loads(scenarios) if scenarios else map(json.loads, sys.stdin):
        if os.fork():
            _, status = os.wait()
            if status:
                died = os.waitstatus_to_exitcode(status)
                answers.write(f'{probe.MARK}{{"died": {died}}}\n')
            answers.flush()
        else:
            answers.write(f"{probe.MARK}{json.dumps(run(scenario))}\n")
            answers.flush()
            os._exit(0)
    os._exit(0)


def run(scenario: dict) -> dict:
    """Play one scenario in this process and return what was observed."""
    scenario = DEFAULTS | scenario
    os.environ.update(scenario["env"])
    sys.path[:0] = scenario["path"]
    started = time.monotonic()
    armed = "sglang_kt_sm120._startup" in sys.modules
    opened: set[str] = set()
    sys.addaudithook(lambda event, what: _notice(opened, event, what))
    if scenario["plugin"]:
        site.addsitedir(scenario["plugin"])
    import stubs

    log = probe._Log()
    logger = logging.getLogger("sglang_kt_sm120")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    stubs.put_on(tuple(scenario["capability"]), scenario["deep_gemm"])
    released_stubs.absent()
    released_stubs.same_capability()
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.quantization import fp8, fp8_utils

    imported = time.monotonic()
    released_stubs.after_import()
    configure(fp8_utils, "auto", scenario)  # newer releases ask it for the size of their groups
    released_stubs.one_rank()
    imported_with = fp8_utils.dispatch_w8a8_block_fp8_linear
    if scenario["loader"]:
        from sglang.srt.plugins import load_plugins

        load_plugins()
    dispatch = fp8_utils.dispatch_w8a8_block_fp8_linear
    result = {
        "file": fp8_utils.__file__,
        "armed": armed,
        "hooked": hasattr(imported_with, "__wrapped__"),
        "wrapped": hasattr(dispatch, "__wrapped__"),
        "twice": hasattr(getattr(dispatch, "__wrapped__", None), "__wrapped__"),
        "deep_gemm": bool(deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM),
        "choices": choices(),
        "reads": _reads(fp8_utils),
    }
    asks = scenario["asks"]
    if "every backend" in asks:
        asks = [ask for ask in asks if ask != "every backend"]
        # A layer that the plugin is to serve is loaded and applied, whatever way it was asked for.
        loaded = OURS if result["wrapped"] else ()
        asks += [{"backend": name, "load": name in loaded} for name in result["choices"]]
    result["asks"] = [_ask(ASK | ask, scenario, fp8, fp8_utils) for ask in asks]
    result["log"] = [[level, text] for level, name, text in log.lines]
    ours = {"deep_gemm", "sglang_kt_sm120", "sglang_kt_sm120.host"}
    result["imported"] = sorted(ours & set(sys.modules))
    root = Path(sys.modules["sglang"].__file__).parents[1]
    files = [
        getattr(m, "__file__", None) for n, m in sys.modules.items() if n.startswith("sglang.")
    ]
    result["sources"] = sorted(str(Path(file).relative_to(root)) for file in files if file)
    result["plugin_files"] = _plugin_files(opened)
    result["cpu"] = round(sum(os.times()[:2]), 1)
    result["seconds"] = [round(imported - started, 1), round(time.monotonic() - imported, 1)]
    return result


def _notice(opened: set[str], event: str, what: tuple) -> None:
    """Keep the names of the plugin's files that are opened, such as tables."""
    if event == "open" and isinstance(what[0], str) and "/sglang_kt_sm120/" in what[0]:
        opened.add(what[0])


def _plugin_files(opened: set[str]) -> list[str]:
    """Return the plugin's files that took part in this process, relative to its site folder."""
    files = [m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "sglang_kt_sm120"]
    if not files:
        return []
    root = Path(sys.modules["sglang_kt_sm120"].__file__).parents[1]
    files += [name for name in opened if not name.endswith(".pyc")]
    return sorted({str(Path(file).relative_to(root)) for file in files if file})


def choices() -> list[str]:
    """Return what `--fp8-gemm-backend` offers here; sglang 0.5.5 has no such option."""
    from sglang.srt import server_args

    found = getattr(server_args, "FP8_GEMM_RUNNER_BACKEND_CHOICES", None)
    if found is None:
        try:
            from sglang.srt.arg_groups import choices as module

            found = getattr(module, "FP8_GEMM_RUNNER_BACKEND_CHOICES", None)
        except ImportError:
            found = None
    return list(found or ["auto"])


def _reads(fp8_utils) -> dict[str, bool]:
    """Return which variables of old releases fp8_utils names in its source."""
    source = Path(fp8_utils.__file__).read_text()
    return {name: name in source for name in VARIABLES}


def configure(fp8_utils, backend: str, scenario: dict) -> None:
    """Do what a scheduler does with its arguments before it builds a model."""
    from sglang.srt import server_args

    initialise = getattr(fp8_utils, "initialize_fp8_gemm_config", None)
    options = {"fp8_gemm_runner_backend": backend} if initialise else {}
    options |= scenario["arguments"]
    arguments = server_args.ServerArgs(model_path="dummy", **options)
    server_args.set_global_server_args_for_scheduler(arguments)
    if initialise is not None and scenario["initialise"]:
        initialise(*([arguments] if inspect.signature(initialise).parameters else []))


def _ask(ask: dict, scenario: dict, fp8, fp8_utils) -> dict:
    result = dict(ask)
    try:
        configure(fp8_utils, ask["backend"], scenario)
    except Exception as error:
        return result | {"error": _error(error), "stage": "configure"}
    dispatch = fp8_utils.dispatch_w8a8_block_fp8_linear
    try:
        stock = getattr(dispatch, "__wrapped__", dispatch)()
        result["stock"] = _name(stock, fp8_utils)
    except Exception as error:
        stock = None
        result["stock"] = f"refused: {error}"
    try:
        method, loaded = _method(ask, fp8)
        got = method.w8a8_block_fp8_linear
    except Exception as error:
        return result | {"error": _error(error), "stage": "construct"}
    result["got"] = _name(got, fp8_utils)
    result["same"] = got is stock
    if "sglang_kt_sm120.op" in sys.modules:
        op = sys.modules["sglang_kt_sm120.op"]
        result["deterministic"] = op.problem_of(1, 128, 128, op.torch.bfloat16).deterministic
    result["ours"] = type(got).__module__ == "sglang_kt_sm120.linear"
    if not ask["load"] or (ask["load"] == "crash" and not CRASHES.match(result["got"])):
        return result
    if ask["block"] != BLOCK:
        return result | _only_load(ask, method)
    try:
        return result | _use(ask, method, loaded, fp8_utils)
    except Exception as error:
        return result | {"error": _error(error), "stage": "use"}


def _method(ask: dict, fp8):
    """Return (linear method, how its `apply` and its scale are called)."""
    if ask["method"] == "fp8":
        config = fp8.Fp8Config(
            is_checkpoint_fp8_serialized=True, activation_scheme="dynamic",
            weight_block_size=ask["block"],
        )  # fmt: skip
        return fp8.Fp8LinearMethod(config), ("apply", "weight_scale_inv")
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_fp8 as module,
    )

    cls = module.CompressedTensorsW8A8Fp8
    if "weight_quant" not in inspect.signature(cls).parameters:
        raise NotImplementedError("no block FP8 in this release's compressed-tensors")
    from compressed_tensors.quantization import QuantizationArgs

    arguments = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=BLOCK)
    method = cls(weight_quant=arguments, is_static_input_scheme=False)
    return method, ("apply_weights", "weight_scale")


def _use(ask: dict, method, names: tuple[str, str], fp8_utils) -> dict:
    """Create, fill, load and apply one layer; return its scale's dtype and how far off it is."""
    import torch

    apply, scale_name = names
    n, k = SHAPE
    layer = _layer(method)
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
    values = torch.randn(n, k, generator=generator).clamp(-4, 4) * 100
    layer.weight.data.copy_(values.to(torch.float8_e4m3fn))
    scale = getattr(layer, scale_name)
    scale.data.copy_(torch.rand(scale.shape, generator=generator) * 1e-4 + 1e-5)
    if ask["requant"]:
        fp8_utils.requant_weight_ue8m0_inplace(layer.weight, scale, BLOCK)
    given = str(scale.dtype)
    method.process_weights_after_loading(layer)
    scale = getattr(layer, scale_name)
    result = {"given": given, "scale": str(scale.dtype)}
    weight, kept = layer.weight.data.clone(), scale.data.clone()
    x = torch.randn(ROWS, k, generator=generator).bfloat16()
    with torch.inference_mode():
        output = getattr(method, apply)(layer, x, bias=None)
    if kept.dtype is not torch.float32 or list(kept.shape) != [-(-n // 128), k // 128]:
        return result | {"output": {"shape": list(output.shape), "scale": list(kept.shape)}}
    return result | {"output": probe._compare(output, x, weight, kept)}


def _layer(method):
    """Return a layer with the (unfilled) weights that the method creates."""
    import torch

    (n, k), layer = SHAPE, torch.nn.Module()
    layer.orig_dtype = torch.bfloat16
    layer.tp_group, layer.deepgemm_mxfp8_input = None, False  # as sglang's LinearBase has them
    method.create_weights(
        layer=layer, input_size_per_partition=k, output_partition_sizes=[n], input_size=k,
        output_size=n, params_dtype=torch.bfloat16, weight_loader=lambda *a, **k: None,
    )  # fmt: skip
    return layer


def _only_load(ask: dict, method) -> dict:
    """Load a layer that is not ours to serve; return which function it is left with."""
    try:
        layer = _layer(method)
        for parameter in layer.parameters():
            parameter.data.fill_(1)
        method.process_weights_after_loading(layer)
    except Exception as error:
        return {"error": _error(error), "stage": "load", "left": _left(method)}
    return {"left": _left(method)}


def _left(method) -> str:
    function = method.w8a8_block_fp8_linear
    function = getattr(function, "func", function)
    return f"{function.__module__}.{getattr(function, '__name__', '')}" if function else "nothing"


def _name(function, fp8_utils) -> str:
    """Return the name under which fp8_utils holds `function` itself, or what it is."""
    inner = getattr(function, "func", function)
    names = [name for name, value in vars(fp8_utils).items() if value is inner]
    name = names[0] if names else f"{type(inner).__module__}.{type(inner).__name__}"
    return name if inner is function else f"partial({name})"


def _error(error: Exception) -> dict:
    described = probe._error(error)
    frames = [f"{Path(f['file']).name}:{f['function']}" for f in described.pop("frames")]
    return described | {"frames": frames[-6:]}


if __name__ == "__main__":
    main()
