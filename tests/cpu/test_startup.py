"""The start-up hook: cheap, idempotent, and right whatever finds sglang."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sglang_kt_sm120 import _startup, env, plugin

UTILS = "srt/layers/quantization/fp8_utils.py"


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A package that is shaped like sglang down to the seam, and counts as "sglang"."""
    root = tmp_path / "sglang"
    folder = root / "srt" / "layers" / "quantization"
    folder.mkdir(parents=True)
    for parent in (folder, folder.parent, root / "srt", root):
        (parent / "__init__.py").touch()
    (folder / "fp8_utils.py").write_text(
        "def stock(**k):\n    return 'stock'\n"
        "def dispatch_w8a8_block_fp8_linear():\n    return stock\n"
    )
    (folder / "fp8.py").write_text(
        "from sglang.srt.layers.quantization.fp8_utils import dispatch_w8a8_block_fp8_linear\n"
        "class Fp8LinearMethod:\n"
        "    def process_weights_after_loading(self, layer):\n        pass\n"
    )
    return tmp_path


def run(code: str, path: Path, **environ: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(path), **environ},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


WRAPPED = """
    from sglang.srt.layers.quantization import fp8, fp8_utils
    print(hasattr(fp8_utils.dispatch_w8a8_block_fp8_linear, "sglang_kt_sm120"),
          fp8.dispatch_w8a8_block_fp8_linear is fp8_utils.dispatch_w8a8_block_fp8_linear,
          hasattr(fp8.Fp8LinearMethod.process_weights_after_loading, "sglang_kt_sm120"))
"""


def test_a_fresh_interpreter_is_armed_and_wraps_both_seams(toy):
    assert run(WRAPPED, toy) == "True True True"


def test_the_module_keeps_its_own_loader(toy):
    code = """
        import inspect
        from sglang.srt.layers.quantization import fp8_utils
        loader = fp8_utils.__loader__
        print(type(loader).__name__, fp8_utils.__spec__.loader is loader)
        print("stock" in inspect.getsource(fp8_utils))
    """
    assert run(code, toy).splitlines() == ["SourceFileLoader True", "True"]


def test_off_leaves_no_trace(toy):
    code = (
        "import sys; print([m for m in sys.modules if 'sm120' in m and not m.endswith('_startup')"
    )
    code += " and m != 'sglang_kt_sm120'], [f for f in sys.meta_path if '_startup' in str(f)])"
    assert run(code, toy, SGLANG_KT_SM120_ENABLE="0") == "[] []"
    assert run(WRAPPED, toy, SGLANG_KT_SM120_ENABLE="0") == "False True False"


def test_spawned_children_are_armed_too(toy):
    code = """
        import multiprocessing
        def main(queue):
            from sglang.srt.layers.quantization import fp8_utils
            queue.put(hasattr(fp8_utils.dispatch_w8a8_block_fp8_linear, "sglang_kt_sm120"))
        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            child = context.Process(target=main, args=(queue,))
            child.start(); print(queue.get(timeout=60)); child.join()
    """
    script = toy / "spawner.py"
    script.write_text(textwrap.dedent(code))
    result = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(toy)},
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "True", result.stderr


def test_editable_installs_that_bring_their_own_finder(toy):
    """Source installs map the package through a finder on sys.meta_path (the report's install)."""
    hidden = toy / "elsewhere"
    hidden.mkdir()
    (toy / "sglang").rename(hidden / "sglang")
    code = f"""
        import importlib.util, sys
        class Editable:
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                if name == "sglang":
                    folder = {str(hidden / "sglang")!r}
                    return importlib.util.spec_from_file_location(
                        name, folder + "/__init__.py", submodule_search_locations=[folder])
        sys.meta_path.append(Editable)
    """
    assert run(textwrap.dedent(code) + textwrap.dedent(WRAPPED), toy) == "True True True"


def test_arming_twice_adds_one_finder(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [])
    _startup.arm()
    _startup.arm()
    assert len(sys.meta_path) == 1


def test_a_broken_plugin_leaves_the_import_alone(toy):
    code = """
        import sglang_kt_sm120.plugin as plugin
        def broken(module): raise OSError("disk on fire")
        plugin.after_import = broken
        from sglang.srt.layers.quantization import fp8_utils
        print(fp8_utils.dispatch_w8a8_block_fp8_linear()())
    """
    assert run(code, toy) == "stock"


DISPATCH, LOAD = "dispatch_w8a8_block_fp8_linear", "process_weights_after_loading(self, layer"
#: What a later sglang might do: (file that is changed, what there, by what) in turn, and the file
#: that the ERROR names; None where there is nothing to name.
FP8 = "fp8.py"
CHANGES = {
    "as known": ([], None),
    "dispatch takes more": ([(UTILS, f"{DISPATCH}()", f"{DISPATCH}(shape=None)")], "fp8_utils.py"),
    "dispatch is gone": (
        [(UTILS, DISPATCH, "choose"), (FP8, f"import {DISPATCH}", f"import choose as {DISPATCH}")],
        "fp8_utils.py",
    ),
    "fp8_utils is gone": ([(FP8, "fp8_utils import", "fp8_ops import")], "fp8.py"),
    "loading takes more": ([(FP8, LOAD, f"{LOAD}, mesh")], "fp8.py"),
    "loading is gone": ([(FP8, LOAD, "load(self, layer")], "fp8.py"),
    "the class is gone": ([(FP8, "class Fp8LinearMethod", "class Fp8Linear")], "fp8.py"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_unknown_seam_is_one_error_and_stock(toy, change):
    edits, named = CHANGES[change]
    folder = (toy / "sglang" / UTILS).parent
    info = toy / "sglang_kt-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: sglang-kt\nVersion: 9.9.9\n")
    for name, before, after in edits:
        file = folder / Path(name).name
        assert before in file.read_text()
        file.write_text(file.read_text().replace(before, after))
    if change == "fp8_utils is gone":
        (folder / "fp8_utils.py").rename(folder / "fp8_ops.py")
    code = """
        import logging
        records = []
        class Keep(logging.Handler):
            def emit(self, record): records.append(record)
        logging.getLogger("sglang_kt_sm120").addHandler(Keep(logging.ERROR))
        from sglang.srt.layers.quantization import fp8
        answer = fp8.dispatch_w8a8_block_fp8_linear()
        from sglang_kt_sm120 import host
        print(getattr(answer, "__name__", answer), host.installed())
        for record in records:
            print(record.levelname, record.getMessage())
    """
    variables = {env.TEST_CAPABILITY.name: "12.0"}
    answer, *errors = run(code, toy, **variables).splitlines()
    if named is None:
        assert (answer, errors) == ("sm120_block_fp8_linear True", [])
        return
    assert answer == "stock False"
    ((level, text),) = (line.split(" ", 1) for line in errors)
    assert level == "ERROR"
    assert f"/{named} of sglang-kt 9.9.9 is not as in any release it knows" in text


def test_the_allow_list_of_a_host_with_a_loader_decides(toy):
    utils = str(toy / "sglang" / UTILS)
    assert not plugin.stands_down(utils, "other")  # no loader there: the variable means nothing
    (toy / "sglang" / "srt" / "plugins").mkdir()
    (toy / "sglang" / "srt" / "plugins" / "__init__.py").touch()
    assert plugin.stands_down(utils, "other")
    assert plugin.stands_down(utils, "__none__")
    assert not plugin.stands_down(utils, "other, kt_sm120")
    assert not plugin.stands_down(utils, "")
    assert run(WRAPPED, toy, SGLANG_PLUGINS="other") == "False True False"
    assert run(WRAPPED, toy, SGLANG_PLUGINS="kt_sm120") == "True True True"


def test_start_up_costs_less_than_importing_json(tmp_path, monkeypatch):
    """Well under a millisecond from bytecode; compared, because CI machines differ and share."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    code = """
        import time, sys
        def cost(prefix, load):
            def once():
                for name in [m for m in sys.modules if m.startswith(prefix)]: del sys.modules[name]
                before = time.process_time()
                load()
                return time.process_time() - before
            return min(once() for _ in range(50))
        def hook():
            sys.meta_path[:] = [f for f in sys.meta_path if "_startup" not in type(f).__module__]
            import sglang_kt_sm120._startup as startup
            startup.arm()
        def standard():
            import json
        print(cost("sglang_kt_sm120", hook) / cost("json", standard))
        print(sorted(m for m in sys.modules if m.startswith("sglang_kt_sm120")))
    """
    ratio, loaded = run(code, Path("."), PYTHONPYCACHEPREFIX=str(tmp_path)).splitlines()
    assert float(ratio) < 1
    assert loaded == "['sglang_kt_sm120', 'sglang_kt_sm120._startup']"


def test_off_words_are_those_of_env():
    assert _startup.OFF == env.FALSE


def test_install_before_fp8_is_imported_wraps_it_later(toy):
    """sglang's own plugin loader may call register() before or after each module is imported."""
    code = """
        from sglang.srt.layers.quantization import fp8_utils
        from sglang_kt_sm120 import plugin
        plugin.register(); plugin.register()
    """
    assert run(textwrap.dedent(code) + textwrap.dedent(WRAPPED), toy) == "True True True"


def test_the_linear_method_by_name(toy):
    """For tools that name a linear method: sglang's, with our callable whatever dispatch says."""
    fp8 = toy / "sglang" / "srt" / "layers" / "quantization" / "fp8.py"
    fp8.write_text(
        fp8.read_text() + "    def __init__(self, quant_config):\n"
        "        self.quant_config = quant_config\n"
        "        self.w8a8_block_fp8_linear = dispatch_w8a8_block_fp8_linear()\n"
    )
    code = """
        from sglang_kt_sm120 import Sm120Fp8LinearMethod
        from sglang.srt.layers.quantization import fp8
        method = Sm120Fp8LinearMethod("config")
        print(isinstance(method, fp8.Fp8LinearMethod), method.quant_config)
        print(type(method.w8a8_block_fp8_linear).__name__, method.w8a8_block_fp8_linear.stock())
    """
    assert run(code, toy).splitlines() == ["True config", "Sm120BlockFp8Linear stock"]
