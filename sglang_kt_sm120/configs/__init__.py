"""Tuned tables: `table` is the format and its checks, `store` finds, reads and writes them.

Standard library only. `shipped/` holds tables that this project measured (none so far), and
`community/` those that card owners gave (`sglang-kt-sm120 tune --share`).
"""

from __future__ import annotations
