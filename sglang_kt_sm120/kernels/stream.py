"""A streaming read, the floor that a decode layer's time is compared with."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .parts import GDC, wait_for_producer

CHUNK = 16384  # bytes per program and step


@triton.jit(do_not_specialize=["chunks"])
def _read_kernel(
    source,  # [chunks * CHUNK] bytes as int32
    sink,  # [1] int32; written only if the bytes sum to one unlikely number
    chunks,
    WORDS: tl.constexpr,
    GDC: tl.constexpr,
):
    word = tl.arange(0, WORDS)
    total = tl.zeros([WORDS], dtype=tl.int32)
    first = tl.program_id(0)
    total += tl.load(source + first.to(tl.int64) * WORDS + word, eviction_policy="evict_first")
    wait_for_producer(GDC)
    for chunk in range(first + tl.num_programs(0), chunks, tl.num_programs(0)):
        total += tl.load(source + chunk.to(tl.int64) * WORDS + word, eviction_policy="evict_first")
    if tl.sum(total) == 0x5EED5EED:
        tl.store(sink, 1)


def read(source: torch.Tensor, sink: torch.Tensor, programs: int, options: dict | None = None):
    """Read all whole 16 KiB chunks of a contiguous tensor once.

    Args:
        source: contiguous, any dtype. sink: int32, one element.
        programs: how many programs share the chunks, at most the number of chunks.
        options: launch options such as `launch_pdl`.
    """
    options = options or {}
    words = source.view(torch.uint8).view(-1).view(torch.int32)
    chunks = words.numel() * 4 // CHUNK
    _read_kernel[(min(programs, chunks),)](
        words,
        sink,
        chunks,
        WORDS=CHUNK // 4,
        GDC=GDC,
        num_warps=4,
        num_stages=1,
        **options,
    )
