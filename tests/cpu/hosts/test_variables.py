"""The variables of releases that read them at import, into a flag, and have no other record."""

from __future__ import annotations

import types

import pytest

from sglang_kt_sm120 import request

NAMES = ("SGLANG_ENABLE_FLASHINFER_GEMM", "SGLANG_ENABLE_FLASHINFER_FP8_GEMM")


@pytest.mark.parametrize("variable", NAMES)
@pytest.mark.parametrize("flag", ["ENABLE_FLASHINFER_GEMM", "ENABLE_FLASHINFER_FP8_GEMM"])
@pytest.mark.parametrize("on", [True, False])
def test_sglang_0_5_5_and_0_5_6(monkeypatch, variable, flag, on):
    for name in request.REQUEST_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(request, "server_argument", lambda *a: None)
    asked = request.requested(types.SimpleNamespace(**{flag: on}))
    assert asked.backend == ("flashinfer_trtllm" if on else "auto")
    assert asked.source == (f"{variable}=1" if on else "")
