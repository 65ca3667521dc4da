"""Environment variables: defaults, and what happens to values that are not understood."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from sglang_kt_sm120 import env

PACKAGE = Path(env.__file__).parent


@pytest.mark.parametrize("variable", env.VARIABLES, ids=lambda v: v.name)
def test_default_is_allowed_and_help_is_there(variable, monkeypatch):
    monkeypatch.delenv(variable.name, raising=False)
    assert variable.get() == variable.parse(variable.default)
    assert variable.help.strip().endswith(".")


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (env.ENABLE, "off", False),
        (env.ENABLE, "1", True),
        (env.REPLACE, "auto, Triton", frozenset({"auto", "triton"})),
        (env.BACKEND, "REFERENCE", "reference"),
        (env.TEST_CAPABILITY, "12.1", (12, 1)),
        (env.TEST_CAPABILITY, "", None),
    ],
)
def test_values(variable, text, value, monkeypatch):
    monkeypatch.setenv(variable.name, text)
    assert variable.get() == value


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (env.ENABLE, "maybe"),
        (env.REPLACE, "auto,trtlm"),
        (env.BACKEND, "fastest"),
        (env.MMA, "wgmma"),
        (env.TEST_CAPABILITY, "12"),
        (env.TEST_CAPABILITY, "sm_120"),
    ],
)
def test_unknown_values_warn_once_and_read_as_the_default(variable, text, monkeypatch, caplog):
    monkeypatch.setenv(variable.name, text)
    monkeypatch.setattr(env, "_warned", set())
    with caplog.at_level(logging.WARNING, "sglang_kt_sm120"):
        assert variable.get() == variable.parse(variable.default)
        variable.get()
    (record,) = caplog.records
    assert text in record.getMessage()
    assert variable.allowed in record.getMessage()


def test_no_variable_is_read_elsewhere():
    """Every name of ours in the source is a variable of env.py; only start-up spells one out."""
    known = {variable.name for variable in env.VARIABLES}
    for file in PACKAGE.rglob("*.py"):
        names = set(re.findall(r"SGLANG_KT_SM120_[A-Z_]*[A-Z]", file.read_text()))
        assert names <= known, file
        reads = re.findall(r"environ(?:\.get\(|\[)['\"]SGLANG_KT_SM120", file.read_text())
        assert not reads or file.name == "_startup.py", file


def test_what_is_misread_is_named(monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    assert env.misread() == {}
    monkeypatch.setenv(env.BACKEND.name, "a; b")
    monkeypatch.setenv(f"{env.PREFIX}ENABEL", "0")
    monkeypatch.setenv(f"{env.PREFIX}XYZ", "1")
    monkeypatch.setenv(env.STRICT.name, "")
    assert env.misread() == {
        env.BACKEND.name: ("'a; b' is not understood", f"allowed: {env.BACKEND.allowed}"),
        f"{env.PREFIX}ENABEL": ("no such variable", f"did you mean {env.ENABLE.name}?"),
        f"{env.PREFIX}XYZ": ("no such variable", "unset it"),
    }
