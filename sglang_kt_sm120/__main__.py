"""`python -m sglang_kt_sm120`: the same as the command `sglang-kt-sm120`."""

from __future__ import annotations

from sglang_kt_sm120.cli import main

if __name__ == "__main__":
    main()
