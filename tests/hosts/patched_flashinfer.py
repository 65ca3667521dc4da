"""FlashInfer's Python patch: the real import of the patched package, its new test and its GEMM."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sglang_kt_sm120.patches import Patch
from tests.hosts import client, lab, releases

Finding = tuple[bool, str]
#: FlashInfer 0.7.2 is what this sglang pins, so its environment can import it.
HOST = releases.Release("sglang", "0.5.23")
#: Run inside that environment: presents a card, then asks for the backend that it has not.
ASK = """
import sys
sys.path.insert(0, {here!r})
import released_stubs, stubs
released_stubs.before_import()
stubs.put_on((12, 0))
import flashinfer, pytest, torch
released_stubs.same_capability()
print("FILE", flashinfer.__file__)
a, b = torch.zeros(4, 256).to(torch.float8_e4m3fn), torch.zeros(128, 256).to(torch.float8_e4m3fn)
try:
    flashinfer.gemm.gemm_fp8_nt_groupwise(
        a, b, torch.ones(2, 4), torch.ones(2, 1), scale_major_mode="MN", backend="trtllm"
    )
except Exception as error:
    print("MESSAGE", type(error).__name__, error)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-rN", {test!r}]))
"""
IMPORTS = """
import pytest
import torch
from flashinfer.utils import *
from flashinfer.utils import BackendSupportedError, backend_requirement
from flashinfer.utils import supported_compute_capability
"""


def findings(patch: Patch, tree: Path) -> Iterator[Finding]:
    """Ask the patched package for trtllm on 12.0, and run the test that the patch adds."""
    if "flashinfer/utils.py" not in patch.files:
        return
    host = releases.build(HOST, lambda *a: None)
    layers = releases._site(host.root).joinpath("layers.pth").read_text().splitlines()
    python = releases._venv(lab.ROOT / "patched" / f"venv-{tree.name}", [tree, *layers])
    with tempfile.TemporaryDirectory() as folder:
        test = Path(folder) / "test_added.py"
        test.write_text(IMPORTS + added_test(patch))
        code = ASK.format(here=str(lab.HERE), test=str(test))
        result = subprocess.run(
            [python / "bin" / "python", "-c", code], env=client.environment(),
            cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
    said = result.stdout
    yield f"FILE {tree}/" in said, f"the patched package is imported{_end(said, result.stderr)}"
    message = re.search(r"^MESSAGE (.+)", said, re.MULTILINE)
    named = message is not None and "supported here: 'cutlass'" in message[1]
    yield named, f"trtllm on 12.0: {message[1] if message else 'no error'}"
    passed = re.search(r"^1 passed", said, re.MULTILINE) is not None and not result.returncode
    yield passed, "its new test: 1 passed" if passed else f"its new test: {said[-800:]}"


def _end(said: str, errors: str) -> str:
    return "" if "FILE " in said else f": {errors[-800:]}"


def added_test(patch: Patch) -> str:
    """Return the test function that the patch adds to a file the wheel does not have."""
    part = patch.diff[patch.diff.index("+++ b/tests/") :]
    lines = [line[1:] for line in part.splitlines()[1:] if line.startswith("+")]
    return "\n".join(lines) + "\n"
