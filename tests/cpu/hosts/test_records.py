"""Records of plays hold as long as what took part in them is the same, and no longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts import records

IMPORTED = "sglang_kt_sm120/host.py"


@pytest.fixture
def site(tmp_path) -> Path:
    """A site folder with an installed plugin."""
    for name in (IMPORTED, "sglang_kt_sm120/cli/look.py", "sglang_kt_sm120.pth",
                 "sglang_kt_sm120-0.1.0.dist-info/entry_points.txt"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "holds"),
    [
        (IMPORTED, False),
        ("sglang_kt_sm120.pth", False),
        ("sglang_kt_sm120-0.1.0.dist-info/entry_points.txt", False),
        ("sglang_kt_sm120/cli/look.py", True),  # took no part
        ("sglang_kt_sm120.start", False),  # was not there before
    ],
)
def test_what_took_part_decides(site, changed, holds):
    kept = records.made_from(site, [IMPORTED])
    assert records.holds(kept, site)
    (site / changed).write_text("another text")
    assert records.holds(kept, site) is holds


def test_a_test_s_own_file_counts(site, tmp_path, monkeypatch):
    further = records.lab.HERE / "made-up.py"
    monkeypatch.setattr(records, "digest", lambda file: f"hash of {file.name}")
    assert not records.holds(records.made_from(site, [IMPORTED]), site, [further])
    kept = records.made_from(site, [IMPORTED], [further])
    assert records.holds(kept, site, [further])
    assert set(records.PLAYED_BY) <= {name.removeprefix("tests/hosts/") for name in kept["tests"]}


def test_another_torch_counts(site, monkeypatch):
    kept = records.made_from(site, [IMPORTED])
    monkeypatch.setattr(records.importlib.metadata, "version", lambda name: "0.0")
    assert not records.holds(kept, site)


def test_a_record_is_whole_or_not_there(tmp_path):
    path = tmp_path / "folder" / "record.json"
    assert records.read(path) is None
    records.write(path, {"a": 1})
    assert records.read(path) == {"a": 1}
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]
    path.write_text('{"a": ')
    assert records.read(path) is None
