"""Finds what is fastest on the card at hand and writes it down as a tuned table.

`space` says what to try, `compiling` compiles it ahead and drops what spills, `engine` decides what
is timed and what has won, `gpu` times it, `results` writes state, table and the file to share.
`sglang_files` does the same for sglang's own kernel, in sglang's own format. docs/tuning.md is for
card owners.
"""

from __future__ import annotations

#: The Ms of a full run: a tile is chosen between them by rounding up (see configs/table.py).
MS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_MS = (1, 4, 16, 64, 1024, 4096)
BUDGET, QUICK_BUDGET = 600.0, 90.0  # seconds
