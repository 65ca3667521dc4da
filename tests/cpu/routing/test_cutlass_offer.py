"""What the plugin takes of the real hosts' CUTLASS: which kernel, and whether it is theirs."""

from __future__ import annotations

import pytest

from tests.cpu.routing.conftest import HOSTS, NEW, OLD, SMALL

JIT = "sglang.jit_kernel.fp8_blockwise_gemm.fp8_blockwise_scaled_mm"


@pytest.mark.parametrize(
    ("host", "backend", "default", "jit"),
    [
        pytest.param(OLD, "auto", None, None, marks=pytest.mark.xdist_group(OLD)),
        pytest.param(NEW, "auto", "sglang_jit", JIT, marks=pytest.mark.xdist_group(NEW)),
        pytest.param(NEW, "triton", None, JIT, marks=pytest.mark.xdist_group(NEW)),
    ],
)
def test_the_hosts_kernel_is_known_by_its_module(ask, host, backend, default, jit):
    offered = ask(host)(plugin_on=True, layers=[SMALL | {"backend": backend}])["cutlass"]
    assert (offered["default"], offered["jit"]) == (default, jit)


@pytest.mark.parametrize("host", HOSTS)
def test_without_the_plugin_nothing_is_taken(ask, host):
    assert ask(host)(layers=[SMALL])["cutlass"] is None
