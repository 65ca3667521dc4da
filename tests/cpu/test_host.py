"""What the user asked for and whose layer it is, decided for every kind of host and device.

The real hosts are in test_routing.py; here are the combinations that no single machine shows.
"""

from __future__ import annotations

import enum
import functools
import logging
import sys
import types

import pytest
import torch

from sglang_kt_sm120 import devices, env, host, limits, linear, op, request, select, warm
from sglang_kt_sm120.backends import cutlass
from sglang_kt_sm120.backends.cutlass import libraries
from tests.helpers import block_fp8


class Backend(enum.Enum):
    AUTO = "auto"
    TRITON = "triton"
    CUTLASS = "cutlass"
    DEEP_GEMM = "deep_gemm"
    FLASHINFER_TRTLLM = "flashinfer_trtllm"


def stock(**_):
    return "stock"


def cutlass_w8a8_block_fp8_linear_with_fallback(**_):
    return "cutlass"


def fp8_utils(argument="auto", resolved=None, reads=()):
    """A host's fp8_utils: the server argument, and what its initialisation made of it."""
    module = types.SimpleNamespace(
        __file__="fp8_utils.py",
        get_fp8_gemm_runner_backend=lambda: Backend(resolved or argument),
        get_exec=lambda: types.SimpleNamespace(
            kernel=types.SimpleNamespace(fp8_gemm_runner_backend=argument)
        ),
        cutlass_w8a8_block_fp8_linear_with_fallback=cutlass_w8a8_block_fp8_linear_with_fallback,
    )
    source = "def initialize_fp8_gemm_config(a):\n    return (" + "".join(f"a.{r}," for r in reads)
    namespace: dict = {}
    exec(source + ")", namespace)
    module.initialize_fp8_gemm_config = namespace["initialize_fp8_gemm_config"]
    return module


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(host, "_said", set())
    monkeypatch.setattr(warm, "_warmed", set())
    cutlass.forget()
    monkeypatch.setattr(devices, "sm120_names", lambda: ["NVIDIA RTX PRO 6000"])
    for variable in (*request.REQUEST_VARIABLES, *(v.name for v in env.VARIABLES)):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def lines():
    """Everything of INFO and above that the plugin logs."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    level = host.logger.level
    host.logger.addHandler(handler)
    host.logger.setLevel(logging.INFO)
    yield records
    host.logger.removeHandler(handler)
    host.logger.setLevel(level)


OURS = linear.Sm120BlockFp8Linear
FLASHINFER = "SGLANG_ENABLE_FLASHINFER_FP8_GEMM"
CUTLASS = "SGLANG_SUPPORT_CUTLASS_BLOCK_FP8"


@pytest.mark.parametrize(
    ("argument", "resolved", "environ", "reads", "backend"),
    [
        ("auto", "auto", {}, (), "auto"),
        ("auto", "triton", {}, (), "auto"),  # sglang >= 0.5.10 rewrites on SM120
        ("auto", "cutlass", {}, (), "auto"),  # sglang >= 0.5.16
        ("triton", "triton", {}, (), "triton"),
        (
            "auto",
            "flashinfer_trtllm",
            {FLASHINFER: "1"},
            (FLASHINFER, CUTLASS),
            "flashinfer_trtllm",
        ),
        ("auto", "cutlass", {CUTLASS: "1"}, (FLASHINFER, CUTLASS), "cutlass"),
        ("auto", "cutlass", {CUTLASS: "1"}, (), "auto"),  # a host that no longer reads it
        ("triton", "triton", {FLASHINFER: "1"}, (FLASHINFER,), "triton"),  # the argument wins
        (None, "flashinfer_trtllm", {}, (), "flashinfer_trtllm"),
    ],
)
def test_requested(argument, resolved, environ, reads, backend, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert request.requested(fp8_utils(argument, resolved, reads)).backend == backend


def test_the_first_dispatch_says_so_once(lines):
    for _ in range(3):
        assert isinstance(host._answer(stock, fp8_utils(), None), OURS)
    (record,) = lines
    assert record.levelname == "INFO"
    for word in ("active", "RTX PRO 6000", "stock", "SGLANG_KT_SM120_ENABLE=0"):
        assert word in record.getMessage()


@pytest.mark.parametrize("argument", ["cutlass", "deep_gemm"])
def test_stepping_aside_names_the_flag(argument, lines):
    for _ in range(2):
        assert host._answer(stock, fp8_utils(argument), None) is stock
    (record,) = lines
    assert f"--fp8-gemm-backend {argument}" in record.getMessage()


def test_replace_widens_and_narrows(monkeypatch):
    monkeypatch.setenv(env.REPLACE.name, "cutlass")
    assert isinstance(host._answer(stock, fp8_utils("cutlass"), None), OURS)
    assert host._answer(stock, fp8_utils("auto"), None) is stock


def test_trtllm_is_served_with_one_warning_or_refused(lines, monkeypatch):
    for _ in range(2):
        assert isinstance(host._answer(stock, fp8_utils("flashinfer_trtllm"), None), OURS)
    (warning,) = [r for r in lines if r.levelname == "WARNING"]
    assert "--fp8-gemm-backend flashinfer_trtllm" in warning.getMessage()
    monkeypatch.setenv(env.STRICT.name, "1")
    with pytest.raises(RuntimeError, match="no kernel for NVIDIA RTX PRO 6000"):
        host._dispatch(lambda: stock, fp8_utils("flashinfer_trtllm"), (), {})


def test_a_refusal_of_the_host_stands_with_the_flags_that_work(lines):
    def refuse():
        raise RuntimeError("the host's words")

    with pytest.raises(RuntimeError, match="the host's words"):
        host._dispatch(refuse, fp8_utils("flashinfer_trtllm"), (), {})
    (record,) = lines
    assert record.levelname == "ERROR"
    assert host.FLAGS_THAT_WORK in record.getMessage()


def test_no_sm120_device_returns_the_very_function(monkeypatch, lines):
    monkeypatch.setattr(devices, "sm120_names", list)
    assert host._dispatch(lambda: stock, fp8_utils(), (), {}) is stock
    assert not lines


@pytest.mark.parametrize("block", [[1, 32], [32, 32], [64, 64], [128, 64]])
def test_other_blocks_are_declined_at_dispatch(block):
    call = {"weight_block_size": block}
    assert host._dispatch(lambda weight_block_size: stock, fp8_utils(), (), call) is stock


def test_a_failure_of_ours_is_one_error_and_stock(monkeypatch, lines):
    monkeypatch.setattr(request, "requested", lambda _: 1 / 0)
    for _ in range(2):
        assert host._dispatch(lambda: stock, fp8_utils(), (), {}) is stock
    (record,) = lines
    assert record.levelname == "ERROR"
    assert "ZeroDivisionError" in record.getMessage()


def method(block=(128, 128), **attributes):
    config = types.SimpleNamespace(weight_block_size=list(block) if block else None)
    return types.SimpleNamespace(
        quant_config=config, w8a8_block_fp8_linear=OURS(stock), **attributes
    )


def on(device: str):
    weight = types.SimpleNamespace(device=torch.device(device))
    return types.SimpleNamespace(weight=weight)


@pytest.mark.parametrize(
    ("capability", "ours"),
    [
        ((8, 0), False), ((8, 6), False), ((8, 9), False), ((9, 0), False), ((10, 0), False),
        ((10, 3), False), ((11, 0), False), ((12, 0), True), ((12, 1), True), ((13, 0), False),
    ],
)  # fmt: skip
def test_a_layer_belongs_to_its_own_device(capability, ours, monkeypatch):
    monkeypatch.setattr(devices, "capability", lambda index: capability)
    kept = host._keep(made := method(), on("cuda:0"))
    assert (kept is not None) is ours
    assert (made.w8a8_block_fp8_linear is stock) is not ours


def test_two_devices_in_one_process(monkeypatch):
    monkeypatch.setattr(devices, "capability", lambda index: [(12, 0), (8, 9)][index])
    first, second = method(), method()
    assert host._keep(first, on("cuda:0")) is first.w8a8_block_fp8_linear
    assert host._keep(second, on("cuda:1")) is None
    assert second.w8a8_block_fp8_linear is stock


@pytest.mark.parametrize(
    "made",
    [method(None), method((32, 32)), method(use_mxfp8=True), method(use_marlin=True)],
    ids=["not block FP8", "32x32", "MXFP8", "Marlin"],
)
def test_layers_of_another_format_get_the_hosts_function_back(made, monkeypatch):
    monkeypatch.setattr(devices, "capability", lambda index: (12, 0))
    assert host._keep(made, on("cuda:0")) is None
    assert made.w8a8_block_fp8_linear is stock


def test_the_hosts_cutlass_is_its_default_only_under_auto():
    def fp8_blockwise_scaled_mm(*_):
        pass

    for module, name in (
        ("sglang.jit_kernel.fp8_blockwise_gemm", "sglang_jit"),
        ("sgl_kernel.gemm", "sgl_kernel"),
    ):
        fp8_blockwise_scaled_mm.__module__ = module
        for request_, stock_, default in (
            (("triton",), cutlass_w8a8_block_fp8_linear_with_fallback, False),
            (("auto",), stock, False),
            (("auto", "cutlass"), cutlass_w8a8_block_fp8_linear_with_fallback, True),
        ):
            utils = fp8_utils(*request_)
            utils.fp8_blockwise_scaled_mm = fp8_blockwise_scaled_mm
            host._answer(stock_, utils, None)
            wanted = name if default else ""
            assert cutlass.known(0, 256, 256, torch.bfloat16).host_default == wanted
    assert libraries.is_installed("sglang_jit")


@pytest.mark.parametrize(
    ("module", "known"),
    [
        ("sglang.jit_kernel.fp8_blockwise_gemm", ("sglang_jit", True)),
        ("sgl_kernel.gemm", (None, False)),
        (None, (None, False)),
    ],
)
def test_a_tool_takes_the_hosts_kernel_without_a_layer(monkeypatch, module, known):
    utils = types.ModuleType(host.FP8_UTILS)
    if module:
        utils.fp8_blockwise_scaled_mm = lambda *_: None
        utils.fp8_blockwise_scaled_mm.__module__ = module
    package = host.FP8_UTILS.rpartition(".")[0]
    for name in ("sglang", "sglang.srt", "sglang.srt.layers", package):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    host.offer_cutlass()  # nothing there: nothing happens
    assert cutlass._host_kernel is None
    sys.modules[package].fp8_utils = utils
    host.offer_cutlass()
    assert (cutlass._host_kernel, libraries.is_installed("sglang_jit")) == known


def test_a_layer_on_a_gpu_is_probed_at_load_and_never_during_capture(monkeypatch):
    """With a device that says it is CUDA; what a probe runs is tested in test_cutlass.py."""
    device = torch.device("cuda", 0)
    weight = types.SimpleNamespace(is_cuda=True, device=device, shape=(4096, 7168))
    card = devices.describe("NVIDIA RTX PRO 6000 Blackwell Server Edition")
    asked = []

    def prove(device, n, k, dtype, named, anyone, *, arch):
        asked.append((n, k, named, anyone, arch))
        return cutlass.known(device.index, n, k, dtype)

    monkeypatch.setattr(devices, "device", lambda index: card)
    monkeypatch.setattr(devices, "arch", lambda index: None)
    monkeypatch.setattr(cutlass, "prove", prove)
    monkeypatch.setenv(env.BACKEND.name, "cutlass")
    for capturing, calls in ((True, 0), (False, 1)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda c=capturing: c)
        host._prove_cutlass(weight, torch.bfloat16)
        assert len(asked) == calls
    assert asked == [(4096, 7168, (), limits.NAMES, None)]
    op.prove_cutlass(device, 4096, 7168, torch.bfloat16, every=True)
    assert asked[1] == (4096, 7168, limits.NAMES, (), None)
    assert op.prove_cutlass(torch.device("cpu"), 4096, 7168, torch.bfloat16) == limits.Known()


def prepared(monkeypatch, **environ):
    """Load a layer through seam two on this machine's CPU, as a real method would."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    weight, scale = block_fp8(256, 256)
    layer = types.SimpleNamespace(
        weight=torch.nn.Parameter(weight, requires_grad=False),
        weight_scale_inv=torch.nn.Parameter(scale, requires_grad=False),
    )
    ours = OURS(stock)
    host._prepare(None, ours, layer, "weight_scale_inv")
    return ours, layer


def test_a_forced_backend_that_cannot_serve_stops_the_load(monkeypatch):
    with pytest.raises(select.NoBackend, match="triton: needs a CUDA device"):
        prepared(monkeypatch, **{env.BACKEND.name: "triton"})
    prepared(monkeypatch, **{env.BACKEND.name: "reference"})


def test_a_layer_that_cannot_be_warmed_goes_back_to_stock(monkeypatch, lines):
    monkeypatch.setattr(warm, "layer", lambda *a: 1 / 0)
    weight, scale = block_fp8(256, 256)
    layer = types.SimpleNamespace(weight=weight, weight_scale_inv=scale)
    made = method()
    host._prepare(made, made.w8a8_block_fp8_linear, layer, "weight_scale_inv")
    assert made.w8a8_block_fp8_linear is stock
    assert "ZeroDivisionError" in lines[-1].getMessage()


def test_and_not_to_a_stock_that_has_no_kernel_here(monkeypatch):
    """Stock of the reported releases is FlashInfer's trtllm: the server would end after all."""
    own = types.SimpleNamespace(
        flashinfer_gemm_w8a8_block_fp8_linear_with_fallback=stock,
        triton_w8a8_block_fp8_linear=lambda **_: "triton",
    )
    monkeypatch.setitem(sys.modules, host.FP8_UTILS, own)
    monkeypatch.setattr(warm, "layer", lambda *a: 1 / 0)
    weight, scale = block_fp8(256, 256)
    made = method()
    layer = types.SimpleNamespace(weight=weight, weight_scale_inv=scale)
    host._prepare(made, made.w8a8_block_fp8_linear, layer, "weight_scale_inv")
    assert made.w8a8_block_fp8_linear is own.triton_w8a8_block_fp8_linear


def test_what_serves_sees_through_a_partial():
    def deepgemm(**_):
        """sglang >= 0.5.21 hands out partials of it."""

    own = types.SimpleNamespace(
        deepgemm_w8a8_block_fp8_linear_with_fallback=deepgemm,
        triton_w8a8_block_fp8_linear=lambda **_: "triton",
    )
    serves = request.what_serves
    assert serves(own, functools.partial(deepgemm, act_scale_ue8m0=True)) is (
        own.triton_w8a8_block_fp8_linear
    )
    assert serves(own, stock) is stock
    assert serves(None, stock) is stock


def test_diffusion_models_keep_their_own_linear(monkeypatch):
    """Their layers load by a method that we do not wrap; nothing would prepare ours."""
    utils = fp8_utils()
    setattr(utils, host.DISPATCH, lambda: stock)
    monkeypatch.setitem(sys.modules, host.FP8_UTILS, utils)
    host._wrap_dispatch(utils)
    call = "answer = fp8_utils.dispatch_w8a8_block_fp8_linear()"
    answers = []
    for name in ("sglang.multimodal_gen.runtime.layers.quantization.fp8", host.FP8):
        module = {"__name__": name, "fp8_utils": utils}
        exec(call, module)
        answers.append(module["answer"])
    assert answers[0] is stock
    assert isinstance(answers[1], OURS)


def test_counters_survive_a_host_that_releases_its_memory(monkeypatch):
    """sglang restores a model's buffers after sleeping, in place, and nothing else."""
    counters = torch.zeros(op.COUNTER_SLOTS, 4, dtype=torch.int32)
    monkeypatch.setattr(op, "counters_for", lambda *a: counters)
    weight, scale = block_fp8(256, 256)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
    made = method()
    for _ in range(2):
        host._prepare(made, made.w8a8_block_fp8_linear, layer, "weight_scale_inv")
        assert dict(layer.named_buffers())["sm120_counters"] is counters
        assert "sm120_counters" not in layer.state_dict()
        assert not counters.any()
        counters.fill_(7)  # as memory that was given away and came back


def test_a_warm_up_that_failed_is_tried_again(monkeypatch):
    monkeypatch.setattr(warm, "representatives", lambda *a: 1 / 0)
    weight, scale = block_fp8(256, 256)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            warm.layer(OURS(stock), weight, scale, torch.bfloat16)


def test_a_layer_that_nobody_can_serve_stops_the_load(monkeypatch):
    layer = types.SimpleNamespace(weight=block_fp8(256, 256)[0], weight_scale_inv=torch.rand(2, 3))
    with pytest.raises(ValueError, match=r"\[256, 256\] needs .* \[2, 2\]"):
        host._prepare(None, OURS(stock), layer, "weight_scale_inv")


def test_deterministic_inference_reaches_the_choice(monkeypatch):
    utils = fp8_utils()
    argument = {"fp8_gemm_runner_backend": "auto", "enable_deterministic_inference": True}
    monkeypatch.setattr(request, "server_argument", lambda _, name: argument.get(name))
    try:
        host._answer(stock, utils, None)
        assert op.problem_of(4, 128, 128, torch.bfloat16).deterministic
    finally:
        op.set_deterministic(False)
    assert not op.problem_of(4, 128, 128, torch.bfloat16).deterministic
