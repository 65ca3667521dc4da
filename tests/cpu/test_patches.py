"""The patches in patches/: complete headers, a pull request's text each, and that they apply."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_kt_sm120.patches import FIELDS, Patch
from tests.hosts import patched

PATCHES = patched.all_patches()
REGISTER = patched.ROOT / "README.md"
each = pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)


def _kind(patch: Patch) -> str:
    return patch.path.parents[1].name


@each
def test_the_header_is_complete(patch):
    assert re.match(r"Subject: \S", patch.path.read_text())
    assert [name for name in patch.header if name != "Subject"] == list(FIELDS)
    assert all(patch.header[name].strip() for name in FIELDS)
    assert patch.header["Files"].split(", ") == list(patch.files)
    name, version = patched.release(patch)
    assert name in patched.LAYOUTS
    if _kind(patch) == "local":
        assert patch.path.parent.name == f"{name}-{version}"


@each
def test_it_is_git_s_own_and_tidy(patch):
    assert patch.files, "git's full hashes are missing"
    added = [line[1:] for line in patch.diff.splitlines() if re.match(r"\+(?!\+\+ )", line)]
    assert not [line for line in added if line != line.rstrip()], "trailing blanks"
    assert not re.search(r"/(work|tmp|home|root)/", patch.path.read_text())


@each
def test_what_is_sent_has_a_text_and_a_test(patch):
    text = patch.path.with_suffix(".md")
    if _kind(patch) == "local":
        assert not text.exists()
        return
    assert text.read_text().startswith("# ")
    tests = [name for name in patch.files if re.search(r"(^|/)tests?/", name)]
    assert tests or "No unit test" in patch.header["Verified"]


@each
def test_the_register_lists_it(patch):
    assert patch.path.relative_to(patched.ROOT).as_posix() in REGISTER.read_text()


def test_the_register_lists_nothing_else():
    named = set(re.findall(r"\]\(((?:send|local)/[^)]+)\)", REGISTER.read_text()))
    assert {name for name in named if not (patched.ROOT / name).exists()} == set()


@pytest.mark.hosts
@each
def test_it_applies_to_its_release(patch, tmp_path: Path):
    """`make patches-check` fetches the large wheels; here those that are at hand count."""
    source = patched.tree(*patched.release(patch), fetch=False)
    if source is None:
        pytest.skip(f"{' '.join(patched.release(patch))} is not here; make patches-check gets it")
    for step in patched.series(patch):
        written = patched.apply(step, _overlay(source, tmp_path / "tree", step), tmp_path / "tree")
        assert all((tmp_path / "tree" / name).is_file() for name in written)


@pytest.mark.hosts
@pytest.mark.parametrize("target", sorted({p.path.parent for p in PATCHES if _kind(p) == "send"}))
def test_all_for_one_target_apply_together(target, tmp_path):
    """Each stands on its base alone; in the order of their numbers they also apply together."""
    patches = [patch for patch in PATCHES if patch.path.parent == target]
    source = patched.tree(*patched.release(patches[0]), fetch=False)
    if source is None:
        pytest.skip(f"{' '.join(patched.release(patches[0]))} is not here")
    for step in patches:
        patched.apply(step, _overlay(source, tmp_path / "tree", step), tmp_path / "tree")


def _overlay(source: Path, done: Path, step: Patch) -> Path:
    """Return a tree in which what earlier steps wrote hides the source's files."""
    if not done.exists():
        return source
    layout = patched.LAYOUTS[patched.release(step)[0]]
    for name in step.files:
        for prefix, place in layout.items():
            target = done / (place + name.removeprefix(prefix))
            original = source / (place + name.removeprefix(prefix))
            if name.startswith(prefix) and original.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(original.read_bytes())
    return done


@pytest.mark.hosts
def test_a_patch_for_another_tree_is_refused(tmp_path):
    """The trial can fail: a patch on a tree that lacks its lines raises with git's words."""
    local = next(patch for patch in PATCHES if patched.release(patch) == ("sglang", "0.5.9"))
    source = tmp_path / "source"
    for name in local.files:
        file = source / name.removeprefix("python/")
        file.parent.mkdir(parents=True)
        file.write_text("another release\n")
    with pytest.raises(RuntimeError, match="patch does not apply"):
        patched.apply(local, source, tmp_path / "tree")
