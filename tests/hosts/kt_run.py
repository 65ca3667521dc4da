"""What the real `kt run` would launch: run inside a host, with kt-kernel's command line at hand.

    python tests/hosts/kt_run.py FOLDER-WITH-kt_kernel run MODEL --kt-method FP8 ...

The whole of kt's own `run` command is executed, from its argument parser to its call of
`subprocess.run`, which prints the server's command line after `MARK` instead of starting it. One
answer is given in advance, through kt's own cache file: that this sglang knows kt's options (kt
would start a server with `--help` to find out, which needs a GPU build of torchvision).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MARK = "KT-COMMAND "


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    cache = Path.home() / ".ktransformers" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "sglang_kt_kernel_supported").write_text("true")
    real = subprocess.run

    def run(command, *args, **kwargs):
        if "sglang.launch_server" in command:
            print(MARK + json.dumps(command), flush=True)
            raise SystemExit(0)
        return real(command, *args, **kwargs)

    subprocess.run = run
    from kt_kernel.cli.main import main as kt

    sys.argv = ["kt", *sys.argv[2:]]
    kt()


if __name__ == "__main__":
    main()
