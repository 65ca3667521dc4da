"""Every start that the end-to-end tests look at, by name."""

from __future__ import annotations

from tests.e2e.runs import Case

MLA, QWEN = "deepseek_v3", "qwen3"
#: The same model as `MLA` in bf16, without any block-FP8 layer.
MLA_BF16 = f"{MLA}_bf16"
TRTLLM_VARIABLE = (("SGLANG_ENABLE_FLASHINFER_FP8_GEMM", "1"),)


#: Hosts whose own paths say how far correct kernels may differ: CUTLASS against Triton, and Triton
#: against itself with every kernel of the process lowered as for SM120 (no change on such a card).
YARDSTICKS = ("kt-0.6.1", "installed")
LOWERED = (("TRITON_OVERRIDE_ARCH", "sm120"),)
COMPILE = (("enable_torch_compile", True), ("torch_compile_max_bs", 8))
#: Compiled with fullgraph=True, cut at attention, captured per number of tokens; some of them.
PIECEWISE = (("enable_piecewise_cuda_graph", True), ("piecewise_cuda_graph_max_tokens", 512))
EAGER = (("disable_cuda_graph", True),)
DETERMINISTIC = (("enable_deterministic_inference", True),)
#: sglang 0.5.17 captures prefill too, by default; fewer sizes of it than by default.
NEWER, FEWER = "sglang-0.5.17", (("cuda_graph_max_bs_prefill", 512),)
NO_GRAPHS = (("cuda_graph_backend_decode", "disabled"), ("cuda_graph_backend_prefill", "disabled"))
#: No launch log, so that the traceback is the host's alone.
BARE = (("E2E_LAUNCH_LOG", ""),)


def _cases():
    """Yield the cases; within a host, the stock runs come first and fill the JIT caches."""
    for host, checkpoints in (
        ("kt-0.6.1", (MLA, QWEN)),
        ("kt-0.5.2.post1", (MLA,)),
        ("kt-0.7.2", (MLA, QWEN)),
        ("installed", (MLA, QWEN)),
    ):
        for kind in checkpoints:
            name = f"{host}-{kind}"
            yield Case(f"{name}-stock-triton", host, kind, "triton", plugin=False)
            if host in YARDSTICKS:
                yield Case(f"{name}-stock-cutlass", host, kind, "cutlass", plugin=False)
                lowered = f"{name}-stock-triton-lowered"
                yield Case(lowered, host, kind, "triton", plugin=False, environment=LOWERED)
            yield Case(f"{name}-auto", host, kind)
            yield Case(f"{name}-auto-deepgemm", host, kind, deep_gemm=True)
    # The crash, from the real server, in CUDA-graph capture.
    for host in ("kt-0.6.1", "kt-0.5.2.post1"):
        yield Case(f"{host}-{MLA}-crash", host, MLA, plugin=False, server=True, environment=BARE)
    yield Case(f"kt-0.6.1-{QWEN}-crash", "kt-0.6.1", QWEN, plugin=False, environment=BARE)
    # 0.7.2: auto works without the plugin, an explicit or environment trtllm does not.
    new, trtllm = "kt-0.7.2", "flashinfer_trtllm"
    crash = f"{new}-{MLA}-trtllm-crash"
    yield Case(crash, new, MLA, trtllm, plugin=False, server=True, environment=BARE)
    crash = f"{new}-{MLA}-trtllm-variable-crash"
    yield Case(crash, new, MLA, plugin=False, environment=BARE + TRTLLM_VARIABLE)
    yield Case(f"{new}-{MLA}-trtllm", new, MLA, trtllm)
    yield Case(f"{new}-{MLA}-trtllm-variable", new, MLA, environment=TRTLLM_VARIABLE)
    yield Case(f"{new}-{MLA}-triton", new, MLA, "triton")
    # torch.compile and piecewise graphs, against neither.
    for kind in (MLA, QWEN):
        name = f"kt-0.6.1-{kind}"
        yield Case(f"{name}-eager", "kt-0.6.1", kind, flags=EAGER)
        yield Case(f"{name}-compiled", "kt-0.6.1", kind, flags=COMPILE)
        yield Case(f"{name}-piecewise", "kt-0.6.1", kind, flags=PIECEWISE)
        for mode, flags in (("compiled", COMPILE), ("piecewise", PIECEWISE)):
            for backend in ("auto", "triton") if kind == QWEN else ("triton",):  # the host's own
                own = f"{name}-{backend}-{mode}-without"
                yield Case(own, "kt-0.6.1", kind, backend, False, False, False, BARE, flags)
        name = f"{NEWER}-{kind}"
        yield Case(f"{name}-default", NEWER, kind, flags=FEWER)
        yield Case(f"{name}-eager", NEWER, kind, flags=NO_GRAPHS)
    kt = f"kt-0.6.1-{QWEN}"
    yield Case(f"{kt}-deterministic", "kt-0.6.1", QWEN, flags=DETERMINISTIC)
    yield Case(f"{kt}-deterministic-eager", "kt-0.6.1", QWEN, flags=DETERMINISTIC + EAGER)
    # Without decode graphs, which would crash first.
    bare = {"plugin": False, "environment": BARE}
    alone = f"{kt}-auto-piecewise-alone-without"
    yield Case(alone, "kt-0.6.1", QWEN, flags=PIECEWISE + EAGER, **bare)
    # What the host's compiler does to this model where no layer is block-FP8.
    yield Case(f"kt-0.6.1-{MLA_BF16}-compiled-without", "kt-0.6.1", MLA_BF16, flags=COMPILE, **bare)
    # The real server over HTTP.
    for host in ("kt-0.6.1", "kt-0.7.2", "installed"):
        yield Case(f"{host}-{MLA}-server", host, MLA, server=True)


CASES = {case.name: case for case in _cases()}
