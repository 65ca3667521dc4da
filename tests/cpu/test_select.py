"""The choice, walked over every shape, M and GPU without a GPU."""

from __future__ import annotations

import dataclasses

import pytest

from sglang_kt_sm120 import devices, env, limits, select, shapes

NAMES = [
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "NVIDIA GeForce RTX 5090",
    "NVIDIA GB10",
]
PROVEN = limits.Known(proven=("sglang_jit", "flashinfer"), host_default="sglang_jit")
R1 = shapes.unique(shapes.SHAPE_SETS["deepseek-r1"])


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.mark.parametrize("name", NAMES)
def test_one_table_of_limits_knows_every_edition(name):
    device = devices.describe(name)
    assert device.capability in select.SM120
    assert device.sm_count in (188, 170, 48)
    assert device.shared_bytes == 101376
    assert device.mma == ("block_scale" if "GeForce" in name else "plain")


@pytest.mark.parametrize(
    ("name", "gpu_class", "bandwidth"),
    [(name, None, None) for name in NAMES]
    + [
        ("RTX PRO 6000", "rtx_pro", 1792.0),
        ("rtx 5090", "geforce", 1792.0),
        ("RTX PRO 6000 Max-Q", "rtx_pro", 1792.0),
        ("GB10", "gb10", 273.0),
        ("NVIDIA DGX Spark", "gb10", 273.0),
        ("NVIDIA GeForce RTX 5090 D v2", "geforce", 0.0),  # 1344 GB/s
        ("NVIDIA GeForce RTX 5090 D", "geforce", 0.0),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "geforce", 0.0),
        ("NVIDIA RTX PRO 6000 Blackwell DC-4-96Q", "rtx_pro", 0.0),
        ("NVIDIA RTX PRO 4500 Blackwell", "rtx_pro", 0.0),
        ("NVIDIA GB100", "other", 0.0),
        ("NVIDIA H200", "other", 0.0),
    ],
)
def test_data_sheet_facts_are_of_the_very_card(name, gpu_class, bandwidth):
    """Another card whose name begins alike has its own memory: unknown, not that of its kin."""
    seen = devices.describe(name, sm_count=170, capability=(12, 0))
    if bandwidth is None:
        assert seen.bandwidth_gbs == devices.describe(name).bandwidth_gbs > 0
        return
    assert (seen.gpu_class, seen.bandwidth_gbs) == (gpu_class, bandwidth)
    if bandwidth:
        assert devices.describe(name).bandwidth_gbs == bandwidth
    else:
        with pytest.raises(ValueError, match="unknown GPU"):
            devices.describe(name)


def test_what_the_device_says_wins_over_the_table():
    device = devices.describe(NAMES[0], sm_count=160, capability=(12, 0))
    assert device.sm_count == 160
    assert devices.describe("NVIDIA Something New", sm_count=10, capability=(12, 0)).sm_count == 10
    with pytest.raises(ValueError, match="unknown GPU"):
        devices.describe("NVIDIA Something New")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layer", R1, ids=lambda layer: f"{layer.n}x{layer.k}")
def test_every_m_of_every_layer_is_served(name, layer):
    device = devices.describe(name)
    backends = []
    for m in range(1, 258):
        choice = select.choose(select.Problem(select.bucket(m), layer.n, layer.k), device)
        assert set(choice.rejected) == set(select.BACKENDS) - {choice.backend}
        assert all(choice.rejected.values())
        assert "capability 12" in choice.rejected["flashinfer_trtllm"]
        backends.append(choice.backend)
    assert set(backends) == {"triton"}


@pytest.mark.parametrize("layer", R1, ids=lambda layer: f"{layer.n}x{layer.k}")
def test_a_proven_host_cutlass_takes_prefill_and_nothing_else(layer):
    device = devices.describe(NAMES[0])
    for m in range(1, 258):
        problem = select.Problem(select.bucket(m), layer.n, layer.k)
        expected = "cutlass" if m > 64 and layer.n % 128 == 0 else "triton"
        for asked in (problem, dataclasses.replace(problem, prequantised=True)):
            choice = select.choose(asked, device, PROVEN)
            assert choice.backend == expected, m  # M % 4 plays no part
            assert expected == "triton" or choice.config == limits.Cutlass("sglang_jit")
        deterministic = dataclasses.replace(problem, deterministic=True)
        choice = select.choose(deterministic, device, PROVEN)
        assert choice.backend == "triton"
        assert "Stream-K" in choice.rejected["cutlass"] or layer.n % 128
        # A host whose own default is something else keeps ours until a table says otherwise.
        elsewhere = dataclasses.replace(PROVEN, host_default="")
        assert select.choose(problem, device, elsewhere).backend == "triton"


def test_only_the_hosts_own_default_takes_prefill_untuned():
    """Another CUTLASS that is proven was never the host's choice, nor anybody's measurement."""
    device, problem = devices.describe(NAMES[0]), select.Problem(128, 4096, 7168)
    struck = (("sglang_jit", "relative error nan on M=1"),)
    other = limits.Known(("flashinfer",), struck, host_default="sglang_jit")
    assert select.choose(problem, device, other).backend == "triton"
    own = dataclasses.replace(other, proven=("flashinfer", "sglang_jit"), struck=())
    assert select.choose(problem, device, own).config == limits.Cutlass("sglang_jit")


def test_the_same_question_has_the_same_answer():
    device = devices.describe(NAMES[3])
    problem = select.Problem(16, 2112, 7168)
    assert select.choose(problem, device) == select.choose(problem, device)


def test_without_cuda_the_reference_serves():
    cpu = select.Device("cpu", (12, 0), 0, cuda=False)
    choice = select.choose(select.Problem(4, 128, 128), cpu)
    assert choice.backend == "reference"
    assert choice.rejected["triton"] == "needs a CUDA device"


def test_forcing(monkeypatch):
    device = devices.describe(NAMES[0])
    monkeypatch.setenv(env.BACKEND.name, "reference")
    choice = select.choose(select.Problem(4, 128, 128), device)
    assert (choice.backend, choice.evidence) == ("reference", "forced")
    monkeypatch.setenv(env.BACKEND.name, "cutlass")
    with pytest.raises(select.NoBackend, match=r"n=2112.*trtllm.*whole 128 x 128 blocks"):
        select.choose(select.Problem(4, 2112, 7168), device, PROVEN)
    choice = select.choose(select.Problem(4, 4096, 7168), device, PROVEN)
    assert (choice.config, choice.evidence) == (limits.Cutlass("sglang_jit"), "forced")
    monkeypatch.setenv(env.BACKEND.name, "triton")
    with pytest.raises(select.NoBackend, match="needs a CUDA device"):
        select.choose(select.Problem(4, 128, 128), select.Device("cpu", (0, 0), 0, cuda=False))


def test_a_forced_cutlass_that_was_struck_off_names_every_reason(monkeypatch):
    monkeypatch.setenv(env.BACKEND.name, "cutlass")
    struck = tuple((name, f"RuntimeError: {number}") for number, name in enumerate(limits.NAMES))
    problem, device = select.Problem(4, 4096, 7168), devices.describe(NAMES[0])
    with pytest.raises(select.NoBackend) as refused:
        select.choose(problem, device, limits.Known(struck=struck))
    for name, why in struck:
        assert f"{name}: {why}" in str(refused.value)
    for word in ("BACKEND=cutlass cannot serve m=4 n=4096 k=7168", "flashinfer_trtllm", "UE8M0"):
        assert word in str(refused.value)
    with pytest.raises(select.NoBackend, match="Stream-K"):
        select.choose(dataclasses.replace(problem, deterministic=True), device, PROVEN)


def test_disabling(monkeypatch):
    device, problem = devices.describe(NAMES[0]), select.Problem(4, 4096, 7168)
    monkeypatch.setenv(env.DISABLED_BACKENDS.name, "triton")
    choice = select.choose(problem, device, PROVEN)
    assert (choice.backend, choice.evidence) == ("cutlass", "only choice")
    assert env.DISABLED_BACKENDS.name in choice.rejected["triton"]
    with pytest.raises(select.NoBackend, match=r"DISABLED_BACKENDS=triton .*n=2112.*whole 128"):
        select.choose(select.Problem(4, 2112, 7168), device, PROVEN)
    prefill = dataclasses.replace(problem, m=128)
    assert select.choose(prefill, device, PROVEN).config == limits.Cutlass("sglang_jit")
    monkeypatch.setenv(env.DISABLED_BACKENDS.name, "flashinfer")
    assert select.choose(prefill, device, PROVEN).config == limits.Cutlass("sglang_jit")
    for names in ("cutlass", "sglang_jit"):
        monkeypatch.setenv(env.DISABLED_BACKENDS.name, names)
        assert select.choose(prefill, device, PROVEN).backend == "triton"
    monkeypatch.setenv(env.DISABLED_BACKENDS.name, "reference,triton")
    with pytest.raises(select.NoBackend, match="reference: SGLANG_KT_SM120_DISABLED_BACKENDS"):
        select.choose(problem, select.Device("cpu", (12, 0), 0, cuda=False))


def test_a_kernel_is_named_with_its_own_reason():
    device, problem = devices.describe(NAMES[0]), select.Problem(128, 4096, 7168)
    why = select.choose(problem, device).rejected["cutlass"]
    for kernel in limits.KERNELS:
        assert f"{kernel.name}: not probed" in why
    struck = limits.Known(struck=(("sglang_jit", "RuntimeError: Error Internal"),))
    why = select.choose(problem, device, struck).rejected["cutlass"]
    assert "sglang_jit: RuntimeError: Error Internal;" in why
    spark = select.choose(problem, devices.describe(NAMES[4])).rejected["cutlass"]
    assert "sgl_kernel: built for 12.0, not for 12.1" in spark
    assert (
        "128 x 128 blocks" in select.choose(select.Problem(9, 576, 128), device).rejected["cutlass"]
    )


@pytest.mark.parametrize(
    ("variables", "default", "problem", "name", "expected"),
    [
        ({}, "", {}, 0, ((), ())),
        ({}, "sglang_jit", {}, 0, (("sglang_jit",), ())),
        ({}, "sgl_kernel", {}, 4, ((), ())),  # it has none for 12.1
        ({}, "sglang_jit", {"n": 2112}, 0, ((), ())),
        ({}, "sglang_jit", {"deterministic": True}, 0, ((), ())),
        ({"BACKEND": "cutlass"}, "", {}, 0, ((), limits.NAMES)),
        ({"BACKEND": "triton"}, "sglang_jit", {}, 0, ((), ())),
        ({"DISABLED_BACKENDS": "triton"}, "", {}, 0, ((), limits.NAMES)),
        ({"DISABLED_BACKENDS": "sglang_jit"}, "sglang_jit", {}, 0, ((), ())),
        ({"DISABLED_BACKENDS": "cutlass"}, "sglang_jit", {}, 0, ((), ())),
    ],
)
def test_only_kernels_that_could_be_taken_are_probed(
    monkeypatch, variables, default, problem, name, expected
):
    for variable, value in variables.items():
        monkeypatch.setenv(env.PREFIX + variable, value)
    asked = select.Problem(**{"m": 1, "n": 4096, "k": 7168, **problem})
    device = devices.describe(NAMES[name])
    assert select.wanted_kernels(asked, device, default) == expected
    cpu = select.Device("cpu", (12, 0), 0, cuda=False)
    assert select.wanted_kernels(asked, cpu, default) == ((), ())


def test_a_k_that_nothing_serves_is_refused():
    with pytest.raises(select.NoBackend, match="K = 2880"):
        select.choose(select.Problem(4, 5120, 2880), devices.describe(NAMES[0]))
