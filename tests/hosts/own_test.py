"""A patch's own unit test, run inside a patched sglang: `python own_test.py TEST.py [12.0]`.

The tests are written for the target's CI. Here they get the machine that stubs.py presents, and
empty modules for what sglang's test helpers import on the way and the tests never touch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import released_stubs
import stubs

#: Imported by sglang.test.test_utils, or by FlashInfer's multi-GPU parts, and used by no test here.
UNTOUCHED = ("datasets", "pytest_asyncio", "msgpack", "pandas", "matplotlib", "evaluate", "cuda")


def main() -> int:
    path = Path(sys.argv[1])
    capability = tuple(int(part) for part in (sys.argv[2] if sys.argv[2:] else "12.0").split("."))
    released_stubs.before_import()
    _cuda_runtime()
    stubs.put_on(capability)
    sys.meta_path.append(stubs._Finder(UNTOUCHED))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    result = unittest.TextTestRunner(verbosity=1).run(suite)
    print(f"RAN {result.testsRun} SKIPPED {len(result.skipped)}", file=sys.stderr)
    return 0 if result.wasSuccessful() else 1


def _cuda_runtime() -> None:
    """FlashInfer looks for libcudart among the libraries loaded; the toolkit's will do."""
    nvcc = shutil.which("nvcc")
    if nvcc:
        root = Path(nvcc).resolve().parents[1]
        for library in [
            *root.glob("lib64/libcudart.so*"),
            *root.glob("targets/*/lib/libcudart.so"),
        ]:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return


if __name__ == "__main__":
    sys.exit(main())
