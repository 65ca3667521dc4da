"""The host's CUTLASS kernels: what is right is taken, and everything else is found out at load.

The kernels here are stand-ins that read the operands as the real ones do: in the layout that
limits.py records, and nothing but.
"""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch

from sglang_kt_sm120 import kernels, limits
from sglang_kt_sm120.backends import cutlass, reference
from sglang_kt_sm120.backends.cutlass import libraries, proof
from tests.helpers import activation, assert_right, block_fp8

CPU = torch.device("cpu")
SHAPE = (CPU, 1280, 384, torch.bfloat16)
NAMES = limits.NAMES
seen: list[int] = []


def quantise(x, *, column_major=False, align=1, rows=None, options=None):
    """Our quantisation kernel's contract without Triton; rows beyond M hold NaN."""
    codes, scales = reference.quantise(x)
    rows = rows or x.shape[0]
    more = rows - x.shape[0]
    codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, 0, 0, more), value=0x7F)
    scales = torch.nn.functional.pad(scales, (0, 0, 0, more), value=torch.nan)
    scales = scales.t().contiguous().t() if column_major else scales.contiguous()
    return codes.view(torch.float8_e4m3fn), scales


def product(name: str, codes, weight, scales, weight_scale, out_dtype):
    """A right kernel, strict about the layout and the rows that the real one wants."""
    kernel = limits.BY_NAME[name]
    m, k = codes.shape
    seen.append(m)
    assert codes.is_contiguous()
    assert weight.is_contiguous()
    assert weight_scale.is_contiguous()
    assert m == 1 or scales.stride() == ((1, m) if kernel.column_major else (k // 128, 1))
    assert m <= kernel.pad_above or m % kernel.rows == 0
    out = torch.empty(m, weight.shape[0], dtype=out_dtype)
    return out.copy_(reference.multiply(codes, scales, weight, weight_scale))


def wrong(change):
    def kernel(*operands):
        return change(product("sgl_kernel", *operands))

    return kernel


def raises(*_):
    raise RuntimeError("Error Internal\nmore of it\nand more")


def last_columns_zero(out):
    out[:, -64:] = 0
    return out


def one_column_doubled(out):
    out[:, 700] *= 2
    return out


def unwritten(out):
    out[0] = torch.nan
    return out


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    seen.clear()
    cutlass.forget()
    monkeypatch.setattr(kernels, "quantise", quantise)
    yield
    cutlass.forget()


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "sglang_kt_sm120")
    return caplog


def loads(monkeypatch, **found):
    """Let `libraries.load` find these products, or raise what is an exception."""

    def load(name):
        thing = found.get(name, ModuleNotFoundError(f"No module named {name!r}"))
        if isinstance(thing, Exception):
            raise thing
        return thing

    monkeypatch.setattr(libraries, "load", load)
    monkeypatch.setattr(libraries, "is_installed", lambda name: name in found)


def right(name):
    return lambda *operands: product(name, *operands)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [128, 1280])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_right_passes(name, n, dtype):
    assert proof.judge(right(name), name, CPU, n, 384, dtype) is None
    assert seen == [limits.BY_NAME[name].padded(m) for m in proof.PROBE_MS]


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (wrong(lambda out: out * 1.02), "relative error 2"),
        (wrong(lambda out: out * 2), "relative error 1"),
        (wrong(last_columns_zero), "relative error"),
        (wrong(one_column_doubled), "relative error"),
        (wrong(unwritten), "relative error nan"),
        (raises, "RuntimeError: Error Internal more of it"),
        (lambda *_: torch.zeros(3, 3), "its output is torch.float32 [3, 3]"),
        (wrong(lambda out: out.float()), "its output is torch.float32"),
        (wrong(lambda out: out.flip(1)), "relative error"),
    ],
    ids=["2 %", "doubled", "columns", "one", "unwritten", "raises", "shape", "dtype", "backwards"],
)
def test_everything_else_is_found_out(kernel, reason):
    assert proof.judge(kernel, "sgl_kernel", *SHAPE).startswith(reason)


@pytest.mark.parametrize("above", [64, 128, 256])
def test_a_kernel_that_is_wrong_for_larger_m_only_is_found_out(above):
    """Hosts change the tile at these M: each is probed."""

    def kernel(*operands):
        out = product("sgl_kernel", *operands)
        return out * 2 if out.shape[0] > above else out

    assert "relative error 1" in proof.judge(kernel, "sgl_kernel", *SHAPE)


def test_neighbours_of_m_never_take_another_tile_for_divisibility():
    """M from 1 to 257 through the padding: what the sources do with M % 4 does not come up."""
    for kernel in limits.KERNELS:
        for decode in [top for top, _ in kernel.tiles if top] or [0]:
            for m in range(1, 258):
                rows = kernel.padded(m)
                assert m <= rows < m + 4
                takes_decode_tile = rows <= decode or (bool(decode) and rows % 4 != 0)
                assert takes_decode_tile == (m <= decode)
                if kernel.name != "sglang_jit" or m > decode:
                    assert rows % 4 == 0


def test_an_output_that_is_never_written_is_not_the_answer_of_an_earlier_call(monkeypatch):
    """What the kernel finds in its output is what `_poison` left there."""
    left = []
    poison = proof._poison

    def remembering(*arguments):
        poison(*arguments)
        left.append(torch.full(arguments[:2], torch.nan, dtype=arguments[2]))

    monkeypatch.setattr(proof, "_poison", remembering)
    why = proof.judge(lambda *_: left.pop(), "sgl_kernel", *SHAPE)
    assert why.startswith("relative error nan")


def test_what_one_kernel_left_behind_is_not_the_answer_of_the_next():
    kept = []

    def writes(*operands):
        kept.append(product("sgl_kernel", *operands))
        return kept[-1]

    def finds(codes, *_):
        return next(out for out in kept if out.shape[0] >= codes.shape[0])[: codes.shape[0]]

    assert proof.judge(writes, "sgl_kernel", *SHAPE) is None
    assert proof.judge(finds, "sgl_kernel", *SHAPE) is None  # else the next line shows nothing
    assert "relative error" in proof.judge(finds, "sglang_jit", *SHAPE)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: torch.exp2(torch.log2(s).round()),
        lambda s: s[:1].expand_as(s).contiguous(),
        lambda s: s.flip(1).contiguous(),
    ],
    ids=["rounded to powers of two", "one row for all", "K backwards"],
)
def test_wrong_scales_are_found_out(change):
    def kernel(codes, weight, scales, weight_scale, out_dtype):
        return product("flashinfer", codes, weight, scales, change(weight_scale), out_dtype)

    assert proof.judge(kernel, "flashinfer", *SHAPE).startswith("relative error")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prequantised", [False, True], ids=["bf16", "e4m3"])
def test_every_m_is_right_and_lies_as_the_kernel_wants_it(monkeypatch, name, prequantised):
    loads(monkeypatch, **{name: right(name)})
    assert cutlass.prove(CPU, 256, 384, torch.bfloat16, (name,), ()).proven == (name,)
    call = cutlass.plan(limits.Cutlass(name), 256, 384)
    layer = block_fp8(256, 384)
    for m in (1, 3, 4, 63, 64, 65, 66, 67, 68, 129):
        x = activation(m, 384)
        codes, scales = reference.quantise(x)
        expected = reference.multiply(codes, scales, *layer)
        if not prequantised:
            layouts = [(x, None)]
        else:  # row-major, column-major, and a slice of a padded buffer, as hosts hand them over
            wide = torch.full((3, m + 5), torch.nan).t()
            wide[:m] = scales
            layouts = [(codes, s) for s in (scales, scales.t().contiguous().t(), wide[:m])]
        for operands in layouts:
            got = call(operands[0], layer[0], layer[1], operands[1], torch.bfloat16, None, None)
            assert got.shape == (m, 256)
            assert got.is_contiguous()
            assert_right(got, expected)
        assert seen[-1] == limits.BY_NAME[name].padded(m)


def test_operands_that_lie_right_are_not_copied():
    codes, scales = reference.quantise(activation(8, 384))
    columns = scales.t().contiguous().t()
    for given, column_major in ((scales, False), (columns, True)):
        got = cutlass.laid_out(codes, given, 8, column_major)
        assert got[0].data_ptr() == codes.data_ptr()
        assert got[1].data_ptr() == given.data_ptr()


def test_a_failure_strikes_one_kernel_off_with_one_warning_and_the_next_is_tried(
    monkeypatch, warnings
):
    loads(monkeypatch, sgl_kernel=raises, flashinfer=right("flashinfer"))
    for _ in range(2):
        known = cutlass.prove(*SHAPE, (), ("sgl_kernel", "flashinfer"))
        assert known.proven == ("flashinfer",)
        assert dict(known.struck) == {"sgl_kernel": "RuntimeError: Error Internal more of it"}
    (record,) = warnings.records
    for word in ("sgl-kernel's", "N=1280 K=384", "Error Internal"):
        assert word in record.getMessage()
    # Another shape, dtype or device is another question.
    for other in ((1, 1280, 384, torch.bfloat16), (None, 1280, 384, torch.float16)):
        assert cutlass.known(*other) == limits.Known()
    assert cutlass.prove(CPU, 256, 384, torch.bfloat16, (), ("sgl_kernel",)).proven == ()
    assert len(warnings.records) == 2


def test_probing_stops_at_the_first_that_is_right_but_tables_get_what_they_name(monkeypatch):
    loads(monkeypatch, **{name: right(name) for name in NAMES})
    assert cutlass.prove(*SHAPE, (), NAMES).proven == NAMES[:1]
    assert cutlass.prove(*SHAPE, ("flashinfer",), ()).proven == ("sgl_kernel", "flashinfer")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Ninja build failed. Ninja output:\nnvcc fatal"),
        RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"),
        AttributeError("'_OpNamespace' 'sgl_kernel' object has no attribute 'fp8_blockwise'"),
        RuntimeError("No compiled cutlass_scaled_mm for CUDA device capability: 120"),
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    ],
    ids=["build", "nvcc", "symbol", "capability", "image"],
)
def test_an_error_that_has_nothing_to_do_with_the_shape_is_met_and_said_once(
    monkeypatch, warnings, error
):
    calls = []

    def broken(*_):
        calls.append(1)
        raise error

    loads(monkeypatch, flashinfer=broken)
    for n in (256, 1280):
        known = cutlass.prove(CPU, n, 384, torch.bfloat16, (), ("flashinfer",))
        assert type(error).__name__ in dict(known.struck)["flashinfer"]
    assert len(calls) == len(warnings.records) == 1
    assert "N=256 K=384, nor for any other layer" in warnings.records[0].getMessage()


def test_a_build_is_announced_once(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "sglang_kt_sm120")
    loads(monkeypatch, **{name: right(name) for name in NAMES})
    for n in (128, 256):
        cutlass.prove(CPU, n, 384, torch.bfloat16, NAMES, ())
    said = [record.getMessage() for record in caplog.records if "nvcc" in record.getMessage()]
    assert len(said) == 2
    for name, line in zip(("sglang_jit", "flashinfer"), said, strict=True):
        assert limits.BY_NAME[name].title in line


def test_a_library_that_is_not_there_is_no_warning(monkeypatch, warnings):
    loads(monkeypatch)
    known = cutlass.prove(*SHAPE, (), NAMES)
    assert known.proven == ()
    assert all(why.startswith("ModuleNotFoundError") for _, why in known.struck)
    assert len(known.struck) == 3
    assert not warnings.records


def test_the_hosts_own_kernel_comes_first(monkeypatch):
    def host(*_):
        pass

    host.__module__ = "sglang.kernels.ops.gemm.fp8_blockwise_gemm"
    cutlass.offer(host, is_default=True)
    loads(monkeypatch, **{name: right(name) for name in NAMES})
    known = cutlass.prove(*SHAPE, (), NAMES)
    assert known == limits.Known(("sglang_jit",), (), host_default="sglang_jit")
    assert cutlass.prove(*SHAPE, ("sgl_kernel",), ()).proven == ("sglang_jit", "sgl_kernel")


# ---------------------------------------------------------------- the libraries themselves


class Recorder:
    """Takes any call, gives back what the library's function was called with."""

    def __call__(self, *arguments, **keywords):
        return arguments, keywords


OPERANDS = (
    torch.zeros(8, 384, dtype=torch.float8_e4m3fn),
    torch.zeros(256, 384, dtype=torch.float8_e4m3fn),
    torch.zeros(8, 3),
    torch.zeros(2, 3),
)


def test_each_library_is_called_by_its_own_contract(monkeypatch):
    """No copies: a transposed operand is a view of what came in."""
    codes, weight, scales, weight_scale = OPERANDS
    namespace = types.SimpleNamespace(
        fp8_blockwise_scaled_mm=types.SimpleNamespace(default=Recorder())
    )
    monkeypatch.setitem(sys.modules, "sgl_kernel", types.ModuleType("sgl_kernel"))
    monkeypatch.setattr(torch.ops, "sgl_kernel", namespace, raising=False)
    jit = Recorder()
    monkeypatch.setattr(libraries, "_offered", {"sglang_jit": jit})
    for name in ("sgl_kernel", "sglang_jit"):
        (a, b, a_scale, b_scale, dtype), keywords = libraries.load(name)(*OPERANDS, torch.float16)
        assert (a, a_scale, dtype, keywords) == (codes, scales, torch.float16, {}) or a is codes
        assert a_scale is scales
        assert b.shape == (384, 256)
        assert b.data_ptr() == weight.data_ptr()
        assert b_scale.shape == (3, 2)
        assert b_scale.data_ptr() == weight_scale.data_ptr()
    module = types.ModuleType("flashinfer.gemm")
    module.gemm_fp8_nt_groupwise = Recorder()
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", module)
    arguments, keywords = libraries.load("flashinfer")(*OPERANDS, torch.bfloat16)
    assert all(got is given for got, given in zip(arguments, OPERANDS, strict=True))
    assert keywords == {
        "scale_major_mode": "K", "backend": "cutlass", "out_dtype": torch.bfloat16
    }  # fmt: skip


def test_what_is_missing_says_so_when_it_is_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_kernel", types.ModuleType("sgl_kernel"))
    with pytest.raises(AttributeError, match="fp8_blockwise_scaled_mm"):
        libraries.load("sgl_kernel")
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    with pytest.raises(ModuleNotFoundError):
        libraries.load("sgl_kernel")
    with pytest.raises(ModuleNotFoundError, match="no JIT kernel"):
        libraries.load("sglang_jit")
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", types.ModuleType("flashinfer.gemm"))
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    with pytest.raises(AttributeError, match="gemm_fp8_nt_groupwise"):
        libraries.load("flashinfer")
