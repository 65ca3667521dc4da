"""Finds what is fastest on the card at hand and writes it down as a tuned table.

`space` says what to try, `compiling` compiles it ahead and drops what spills, `engine` decides what
is timed and what has won, `gpu` times it, `results` writes state, table and the file to share;
`contract` is what they say to each other.
`sglang_files` does the same for sglang's own kernel, in sglang's own format. docs/tuning.md is for
card owners.
"""

from __future__ import annotations

#: The Ms of a full run, those that say most about the others first: a run may end at any time. A
#: table answers between them by rounding up (see configs/table.py).
MS = (1, 8, 16, 64, 1024, 4, 32, 4096, 2, 12, 24, 48, 128, 256, 2048, 96, 512, 8192)
#: Prefill first: there the host's CUTLASS is most likely to win.
QUICK_MS = (1024, 1, 16, 4096, 64, 4)
BUDGET, QUICK_BUDGET = 600.0, 90.0  # seconds
