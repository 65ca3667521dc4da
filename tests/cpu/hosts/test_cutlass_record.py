"""The record of `make cutlass-aot`, and that limits.py and docs/cutlass.md say what it says."""

from __future__ import annotations

import json

import pytest

from sglang_kt_sm120 import limits
from tests.hosts import cutlass_aot, lab

RECORD = json.loads((lab.PROJECT / "docs" / "cutlass-aot.json").read_text())
#: The release that each entry of limits.py was read in.
SUBJECT = {
    "sgl_kernel": "sgl-kernel 0.3.21",
    "sglang_jit": "sglang-kt 0.7.2 JIT",
    "flashinfer": "flashinfer 0.6.3",
}


def rows(subject: str) -> list[dict]:
    return [row for row in RECORD["kernels"] if row["subject"] == subject]


def test_every_subject_is_recorded_and_multiplies_fp8():
    assert RECORD["ok"]
    assert RECORD["nvcc"].startswith("V13.0")
    for subject in cutlass_aot.SUBJECTS:
        made = [cutlass_aot.Kernel(**row) for row in rows(subject)]
        assert made
        assert not cutlass_aot.failures(made)


@pytest.mark.parametrize("kernel", limits.KERNELS, ids=lambda kernel: kernel.name)
def test_the_limits_are_what_was_compiled(kernel):
    found = rows(SUBJECT[kernel.name])
    assert {tile for _, tile in kernel.tiles} <= {row["tile"] for row in found}
    along = "along M" if kernel.column_major else "along K"
    assert {row["activation_scales"] for row in found} == {along}
    assert {row["weight_scales"] for row in found} == {"along K"}  # as checkpoints have them


def test_the_document_has_the_table():
    text = (lab.PROJECT / "docs" / "cutlass.md").read_text()
    assert cutlass_aot.markdown(RECORD["kernels"]) in text


def name(tile, rows_of_a: int, stride_of_a: str, rows_of_b: int, stride_of_b: str, output, **more):
    """A demangled name with all that is read in it."""

    def layout(granularity, stride):
        other = {"cute::C<1>": "int", "int": "cute::C<1>"}[stride]
        return (
            f"cute::Layout<cute::tuple<cute::tuple<cute::C<{granularity}>, int>, "
            "cute::tuple<cute::C<128>, int>, int>, cute::tuple<cute::tuple<cute::C<0>, "
            f"{stride} >, cute::tuple<cute::C<0>, {other}>, int> > >"
        )

    m, n, k = tile
    schedule = more.get("schedule", "Cooperative")
    return (
        "MainloopSm120TmaWarpSpecializedBlockwiseScaling<2, 2, cute::tuple<cute::C<1>, cute::C<1>, "
        f"cute::C<1> >, cutlass::gemm::KernelTmaWarpSpecialized{schedule}"
        f"BlockwiseScalingSm120<2> >, cute::tuple<cute::C<{m}>, cute::C<{n}>, cute::C<{k}> >, "
        f"cutlass::float_e4m3_t, {layout(rows_of_a, stride_of_a)}, cutlass::float_e4m3_t, "
        f"{layout(rows_of_b, stride_of_b)}, CollectiveEpilogue<void, cute::tuple<long>, "
        f"cutlass::{output}_t, cutlass::half_t>{more.get('scheduler', '')}"
    )


ONE, ANY = "cute::C<1>", "int"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            name((128, 64, 128), 1, ONE, 128, ANY, "bfloat16", schedule="Pingpong"),
            ("128x64x128", "pingpong", "bfloat16", "along M", "along K"),
        ),
        (
            name((128, 32, 128), 128, ANY, 1, ONE, "half"),
            ("32x128x128", "cooperative, weight first", "float16", "along M", "along K"),
        ),
        (
            name((128, 128, 128), 1, ANY, 128, ONE, "half", scheduler="StreamKScheduler"),
            ("128x128x128", "cooperative, stream-k", "float16", "along K", "along N"),
        ),
        (name((128, 128, 128), 128, ANY, 128, ANY, "half"), None),
    ],
)
def test_names_are_read(text, expected):
    found = cutlass_aot.signature(text)
    assert (found and tuple(found.values())) == expected


def test_a_name_that_cannot_be_read_is_no_kernel_of_this_make():
    with pytest.raises(cutlass_aot.Failure, match="another make"):
        cutlass_aot.signature("cutlass::gemm::KernelTmaWarpSpecializedBlockScaled<int>")


@pytest.mark.parametrize(
    ("mma", "outputs", "says"),
    [
        ({"QMMA.16832.F32.E4M3.E4M3": 128}, ("bfloat16", "float16"), []),
        ({"QMMA.16832.F32.E4M3.E4M3": 128}, ("bfloat16",), ["no kernel with float16 output"]),
        ({"HMMA.16816.F32": 8}, ("bfloat16", "float16"), ["no FP8 tensor-core", "emulated"]),
        ({}, ("bfloat16", "float16"), ["no FP8 tensor-core"]),
    ],
    ids=["native", "one output", "emulated", "none"],
)
def test_what_fails(mma, outputs, says):
    kernels = [
        cutlass_aot.Kernel("x", "128x128x128", "s", output, "along M", "along K", 168, 0, 0, mma)
        for output in outputs
    ]
    found = " | ".join(cutlass_aot.failures(kernels))
    assert bool(found) == bool(says)
    for text in says:
        assert text in found
