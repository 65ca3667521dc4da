"""torch.compile, piecewise and prefill graphs in a real server: served by us, with eager's tokens.

Compiling lets Inductor fuse what lies between our ops, which moves the last bits of a norm; so
tokens are compared as between two correct paths. Graphs alone move nothing.
"""

from __future__ import annotations

import os

import pytest

from tests.e2e import compare, hosts
from tests.e2e.cases import MLA, NEWER, QWEN
from tests.e2e.judge import calls, here, stock_calls

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not (torch.cuda.is_available() or os.environ.get("E2E_RECORDS")), reason="no CUDA device"
    ),
    pytest.mark.skipif(not hosts.pythons(), reason="no real sglang host: see tests/e2e/hosts.py"),
]
KT = "kt-0.6.1"
MODES = [f"{KT}-{kind}-{mode}" for kind in (QWEN, MLA) for mode in ("compiled", "piecewise")]
DEFAULTS = [f"{NEWER}-{kind}-default" for kind in (QWEN, MLA)]


def eager_of(name: str) -> str:
    return name.rpartition("-")[0] + "-eager"


def compiled_graphs(got: dict) -> int:
    return max(process["dynamo"]["graphs"] for process in got["processes"])


@pytest.mark.parametrize("name", here(*MODES, *DEFAULTS))
def test_served_with_the_tokens_of_eager(name, record):
    got, eager = record(name), record(eager_of(name))
    assert got["answers"], got["traceback"] or got["lines"]
    assert eager["answers"], eager["traceback"] or eager["lines"]
    assert calls(got, by="plugin", name="triton", capturing=True) > 0
    assert calls(eager, by="plugin", name="triton") > 0
    assert calls(eager, by="plugin", capturing=True) == 0
    assert not stock_calls(got)
    result = compare.compare(got["answers"], eager["answers"])
    print(name, "against eager:", result)
    assert compare.near_ties_only(result), result


@pytest.mark.parametrize("name", here(*MODES))
def test_torch_compile_was_at_work(name, record):
    assert compiled_graphs(record(name)) > 0
    assert compiled_graphs(record(eager_of(name))) == 0
