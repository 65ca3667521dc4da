"""What had been read in each release's source before any of it was run, to be held against it.

Reading is not running: where a play shows something else, docs/compatibility.md says so.
"""

from __future__ import annotations

FLASHINFER, DEEP_GEMM = (
    "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback",
    ("deepgemm_w8a8_block_fp8_linear_with_fallback"),
)
CUTLASS, TRITON = "cutlass_w8a8_block_fp8_linear_with_fallback", "triton_w8a8_block_fp8_linear"
FLAG = ["auto", "deep_gemm", "flashinfer_trtllm", "cutlass", "triton", "aiter"]
#: (distribution, first release it holds for): stock under auto on 12.0 with DeepGEMM on and off,
#: what --fp8-gemm-backend offers beyond FLAG, and whether there is a plugin loader.
READ = (
    ("sglang-kt", "0.5.2", DEEP_GEMM, FLASHINFER, ["flashinfer_deepgemm"], False),
    ("sglang-kt", "0.6.2", TRITON, TRITON, ["flashinfer_deepgemm"], False),
    ("sglang-kt", "0.7.0", CUTLASS, CUTLASS, ["flashinfer_deepgemm"], False),
    ("sglang", "0.5.5", DEEP_GEMM, TRITON, None, False),
    ("sglang", "0.5.6", DEEP_GEMM, FLASHINFER, [], False),
    ("sglang", "0.5.9", DEEP_GEMM, FLASHINFER, ["flashinfer_deepgemm"], False),
    ("sglang", "0.5.10", TRITON, TRITON, ["flashinfer_deepgemm", "flashinfer_cutlass"], False),
    ("sglang", "0.5.11", TRITON, TRITON, ["flashinfer_deepgemm", "flashinfer_cutlass"], True),
    ("sglang", "0.5.16", CUTLASS, CUTLASS, ["flashinfer_deepgemm", "flashinfer_cutlass"], True),
    ("sglang", "0.5.18", CUTLASS, CUTLASS,
     ["flashinfer_deepgemm", "flashinfer_cutlass", "flashinfer_cutedsl"], True),
)  # fmt: skip


def differences(record: dict) -> list[str]:
    """Return, in words, where the played release is not as it had been read."""
    read = None
    for line in READ:
        if line[0] == record["distribution"] and _key(line[1]) <= _key(record["version"]):
            read = line
    _, _, on, off, further, loader = read
    played, found = record["played"], []
    for state, expected in (("on", on), ("off", off)):
        seen = (played[f"plugin, 12.0, {state}"].get("asks") or [{}])[0].get("stock")
        if seen != expected:
            found.append(f"read: auto with DeepGEMM {state} is {expected}; run: {seen}")
    choices = set(played["plugin, 12.0, off"].get("choices", ()))
    expected = {"auto"} if further is None else {*FLAG, *further}
    if choices != expected:
        found.append(f"read: choices {sorted(expected)}; run: {sorted(choices)}")
    if bool(record["loader"]) is not loader:
        found.append(f"read: plugin loader {loader}; run: {bool(record['loader'])}")
    return found


def _key(version: str) -> list[int]:
    return [int(part) for part in version.replace("post", "").split(".")]
