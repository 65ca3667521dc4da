"""`sglang-kt-sm120 patch` on a checkout and on an installed copy: check, apply, revert, refuse."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_kt_sm120 import cli, patches

FILE = "python/sglang/srt/layers/quantization/fp8_utils.py"
RELEASED = "".join(f"line {i}\n" for i in range(40))
OTHER = RELEASED.replace("line 3\n", "another release's line 3\n")


def _patch_text(before: str, after: str, folder: Path) -> str:
    """Return a patch file's text, its diff made by git."""
    for name, text in (("a", before), ("b", after)):
        file = folder / name / FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    command = ["git", "diff", "--no-index", "--full-index", "--no-prefix", "a", "b"]
    diff = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    header = "".join(f"{name}: what it says\n  and goes on\n" for name in patches.FIELDS)
    return f"Subject: a fix\n{header}\n{diff}"


@pytest.fixture
def local(tmp_path, monkeypatch) -> Path:
    """Two local patches with the same hunk, for two releases that differ elsewhere in the file."""
    folder = tmp_path / "patches_local"
    for name, text in (("sglang-0.0.1", OTHER), ("sglang-kt-0.0.2", RELEASED)):
        (folder / name).mkdir(parents=True)
        after = text.replace("line 20\n", "line 20, mended\n")
        diff = _patch_text(text, after, tmp_path / f"made-{name}")
        (folder / name / "0001-fix.patch").write_text(diff)
    monkeypatch.setattr(patches, "FOLDERS", (folder,))
    monkeypatch.setattr(patches, "servers", lambda tree: [])
    return folder


def _tree(root: Path, prefix: str, text: str = RELEASED) -> Path:
    file = root / (FILE if prefix else FILE.removeprefix("python/"))
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize("prefix", ["python", ""])
@pytest.mark.parametrize("tool", ["git", "patch"])
def test_apply_and_revert(local, tmp_path, monkeypatch, prefix, tool):
    which = patches.shutil.which
    if which(tool) is None:
        pytest.skip(f"no {tool} here")
    monkeypatch.setattr(patches.shutil, "which", lambda name: which(name) if name == tool else None)
    file = _tree(tmp_path / "tree", prefix)
    backup = file.with_name(file.name + patches.BACKUP)

    before = patches.plan(tmp_path / "tree")
    assert (before.state, before.patch.name) == ("fits", "sglang-kt-0.0.2/0001-fix.patch")
    assert file.read_text() == RELEASED, "a look changes nothing"

    assert patches.apply(tmp_path / "tree")[0] == "applied sglang-kt-0.0.2/0001-fix.patch"
    assert "line 20, mended" in file.read_text()
    assert backup.read_text() == RELEASED
    assert patches.plan(tmp_path / "tree").state == "applied"
    with pytest.raises(patches.PatchError, match="is applied already; --revert"):
        patches.apply(tmp_path / "tree")

    patches.revert(tmp_path / "tree")
    assert file.read_text() == RELEASED
    assert not backup.exists()
    assert sorted(path.name for path in file.parent.iterdir()) == [file.name]
    with pytest.raises(patches.PatchError, match="nothing to revert"):
        patches.revert(tmp_path / "tree")


def test_the_tree_s_content_decides_not_its_name(local, tmp_path):
    _tree(tmp_path / "sglang-kt-0.0.2", "", OTHER)
    assert patches.plan(tmp_path / "sglang-kt-0.0.2").patch.path.parent.name == "sglang-0.0.1"


def test_a_changed_file_is_said_to_be_one(local, tmp_path):
    file = _tree(tmp_path / "tree", "", RELEASED + "a line of the user's own\n")
    now = patches.plan(tmp_path / "tree")
    assert now.state == "fits roughly"
    assert "not as released" in "\n".join(now.lines())
    patches.apply(tmp_path / "tree")
    assert file.read_text().endswith("a line of the user's own\n")
    patches.revert(tmp_path / "tree")
    assert file.read_text() == RELEASED + "a line of the user's own\n"


@pytest.mark.parametrize(
    ("text", "state", "code", "said"),
    [
        ("if is_sm120_supported():\n", "not needed", 0, "It needs none"),
        ("# SM_120 must skip\n", "not needed", 0, "It needs none"),
        ("quite another file\n", "none", 1, "the plugin serves without a patch"),
    ],
)
def test_a_tree_that_no_patch_fits(local, tmp_path, text, state, code, said):
    """A release that knows SM120 needs none; any other is told what to do."""
    file = _tree(tmp_path / "tree", "", text)
    now = patches.plan(tmp_path / "tree")
    assert (now.state, now.patch) == (state, None)
    with pytest.raises(patches.PatchError, match="nothing to apply"):
        patches.apply(tmp_path / "tree")
    assert file.read_text() == text
    got, shown, _ = _run("--check", str(tmp_path / "tree"))
    assert (got, said in shown) == (code, True)
    got, shown, _ = _run("--check", "--json", str(tmp_path / "tree"))
    answer = json.loads(shown)
    assert (got, answer["ok"], answer["state"]) == (code, code == 0, state)
    assert said in answer["lines"][-1]
    assert _run("--apply", "--yes", str(tmp_path / "tree"))[0] == 1


def test_revert_of_a_file_changed_since(local, tmp_path):
    file = _tree(tmp_path / "tree", "")
    patches.apply(tmp_path / "tree")
    file.write_text(file.read_text() + "added later\n")
    done = patches.revert(tmp_path / "tree")
    assert file.read_text() == RELEASED + "added later\n", "what came later is kept"
    assert any("stays" in line for line in done), "and so is the backup that differs"


def test_record_is_named(local, tmp_path):
    _tree(tmp_path / "site", "")
    info = tmp_path / "site" / "sglang_kt-0.0.2.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(f"{FILE.removeprefix('python/')},sha256=x,1\n")
    assert "will no longer match" in "\n".join(patches.plan(tmp_path / "site").lines())
    assert any("sglang_kt-0.0.2.dist-info" in line for line in patches.apply(tmp_path / "site"))


def test_an_enclosing_repository_does_not_matter(local, tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    file = _tree(tmp_path / ".venv" / "site-packages", "")
    patches.apply(tmp_path / ".venv" / "site-packages")
    assert "mended" in file.read_text()


@pytest.mark.parametrize("inside", ["", "python", "python/sglang"])
def test_places_of_a_checkout(tmp_path, inside):
    _tree(tmp_path, "python")
    assert patches.find(tmp_path / inside) == patches.Tree(tmp_path.resolve(), "python")


@pytest.mark.parametrize("inside", ["", "sglang"])
def test_places_of_an_installation(tmp_path, inside):
    _tree(tmp_path / "site-packages", "")
    tree = patches.Tree((tmp_path / "site-packages").resolve(), "")
    assert patches.find(tmp_path / "site-packages" / inside) == tree


def test_no_sglang(tmp_path):
    with pytest.raises(patches.PatchError, match="no sglang in"):
        patches.find(tmp_path)


# ---------------------------------------------------------------- running servers


def _process(proc: Path, pid: int, command: str, cwd: Path, maps: str = "", environ: str = ""):
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode())
    (folder / "maps").write_text(maps)
    (folder / "environ").write_text(environ)
    (folder / "cwd").symlink_to(cwd)


def test_processes_that_use_a_tree(tmp_path):
    root = tmp_path / "env" / "site-packages"
    _tree(root, "")
    editable = tmp_path / "other" / "site-packages"
    editable.mkdir(parents=True)
    (editable / "sglang.pth").write_text(f"{root}\n")
    proc, serve = tmp_path / "proc", "/x/bin/python -m sglang.launch_server"
    _process(proc, 11, serve, tmp_path, f"7f-8f r-xp 0 0 0 {root}/torch/lib/libtorch.so\n")
    _process(proc, 12, serve, tmp_path, "7f-8f r-xp 0 0 0 /elsewhere/site-packages/torch/x.so\n")
    _process(proc, 13, "sglang::scheduler", root)
    _process(proc, 14, serve, tmp_path, "", f"PYTHONPATH={root}")
    _process(proc, 15, serve, tmp_path, f"7f-8f r-xp 0 0 0 {editable}/torch/lib/libtorch.so\n")
    _process(proc, 16, "vim sglang/version.py", root)
    _process(proc, 17, "/x/bin/python train.py", root)
    (proc / "self").mkdir()
    found = patches.servers(patches.find(root), proc)
    assert [server.pid for server in found] == [11, 13, 14, 15]


def test_a_running_server_is_found_and_respected(local, tmp_path, monkeypatch):
    file = _tree(tmp_path / "tree", "")
    monkeypatch.undo()
    monkeypatch.setattr(patches, "FOLDERS", (local,))
    code = "import time; time.sleep(60)"
    command = [sys.executable, "-c", code, "sglang.launch_server"]
    with subprocess.Popen(command, cwd=file.parent) as it:
        try:
            deadline = time.monotonic() + 10
            while not Path(f"/proc/{it.pid}/cmdline").read_bytes() and time.monotonic() < deadline:
                time.sleep(0.01)
            with pytest.raises(patches.PatchError, match=f"stop it first:\n.*{it.pid}: "):
                patches.apply(tmp_path / "tree")
        finally:
            it.kill()
    assert file.read_text() == RELEASED
    patches.apply(tmp_path / "tree")


# ---------------------------------------------------------------- the command


def _run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["patch", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_installed_release_is_the_one_named(local, tmp_path):
    """Releases that share a file share the patch: the wheel's metadata says which is here."""
    shutil.copytree(local / "sglang-kt-0.0.2", local / "sglang-kt-0.0.3.post1")
    _tree(tmp_path / "site", "")
    for version in ("0.0.3.post1", "0.0.2"):
        info = tmp_path / "site" / f"sglang_kt-{version}.dist-info"
        info.mkdir()
        (info / "RECORD").write_text(f"{FILE.removeprefix('python/')},sha256=x,1\n")
        assert patches.plan(tmp_path / "site").patch.path.parent.name == f"sglang-kt-{version}"
        shutil.rmtree(info)


def test_the_diff_is_shown_as_it_is(local, tmp_path, monkeypatch):
    """Neither wrapped nor cut, however narrow the terminal: it can be piped into git."""
    long = f"line 20, {'mended ' * 40}\n".replace(" \n", "\n")
    patch = next(local.glob("sglang-kt-0.0.2/*.patch"))
    patch.write_text(_patch_text(RELEASED, RELEASED.replace("line 20\n", long), tmp_path / "made"))
    monkeypatch.setenv("COLUMNS", "40")
    _tree(tmp_path / "tree", "")
    code, shown, _ = _run("--check", str(tmp_path / "tree"))
    assert code == 0
    assert patches.read(patch).diff in shown


def test_what_there_is_nothing_to_do_for_is_said_once(local, tmp_path):
    file = _tree(tmp_path / "tree", "")
    assert _run("--apply", "--yes", str(tmp_path / "tree"))[0] == 0
    code, shown, error = _run("--apply", "--yes", str(tmp_path / "tree"))
    assert code == 1
    assert (shown + error).count("is applied") == 1
    assert "nothing to apply; --revert takes it back" in error
    assert _run("--revert", "--yes", str(tmp_path / "tree"))[0] == 0
    assert file.read_text() == RELEASED
    code, _, error = _run("--revert", "--yes", str(tmp_path / "tree"))
    assert (code, error.strip()) == (1, "error: nothing to revert")


def test_json_says_it_whole(local, tmp_path):
    _tree(tmp_path / "tree", "")
    code, shown, _ = _run("--apply", "--json", str(tmp_path / "tree"))
    assert code == 2, "it cannot ask"
    assert _run("--apply", "--yes", "--json", str(tmp_path / "tree"))[0] == 0
    code, shown, _ = _run("--apply", "--yes", "--json", str(tmp_path / "tree"))
    answer = json.loads(shown)
    assert (code, answer["ok"], answer["lines"]) == (1, False, [])
    assert (
        answer["error"]
        == "sglang-kt-0.0.2/0001-fix.patch is applied already; --revert takes it back"
    )


# ---------------------------------------------------------------- the real ones


def test_the_package_brings_its_local_patches():
    found = {patch.path.parent.name for patch in patches.available()}
    assert found == {"sglang-kt-0.5.2.post1", "sglang-kt-0.6.1.post2", "sglang-0.5.9"}
    for patch in patches.available():
        assert set(patch.header) >= set(patches.FIELDS), patch.name
        assert patch.files, f"{patch.name}: git's full hashes are missing"
        assert patch.diff.startswith("diff --git ")


def test_reading_costs_no_import():
    code = "import sys, sglang_kt_sm120.patches; print({'torch', 'sglang'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"SGLANG_KT_SM120_ENABLE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "set()"
