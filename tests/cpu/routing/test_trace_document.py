"""docs/backend-selection.md says what is in the wheels and what happens, line by line."""

from __future__ import annotations

import json
import re

import pytest

from tests.hosts import lab

from .conftest import HOSTS, NEW, OLD, SMALL

DOCUMENT = (lab.PROJECT / "docs" / "backend-selection.md").read_text()
BEFORE, _, AFTER = DOCUMENT.partition("\n## sglang-kt 0.7.2\n")
SECTIONS = {OLD: BEFORE, NEW: AFTER}
READ = re.compile(r"^\| `([\w/]+\.py):(\d+)` \| `(.+?)` \|", re.M)
RAN = re.compile(r"<!-- ran: (\S+) (\S+) ?(\S*) -->\n```\n(.*?)```", re.S)
SETTINGS = re.compile(r"<!-- settings: (\S+) -->\n((?:\|.*\n)+)")


@pytest.mark.parametrize("host", HOSTS)
def test_lines_that_were_read(host):
    sglang = lab.install(host).site / "sglang"
    rows = READ.findall(SECTIONS[host])
    assert len(rows) > 25
    for file, line, code in rows:
        assert code in (sglang / file).read_text().splitlines()[int(line) - 1], (file, line)


@pytest.mark.parametrize("host", HOSTS)
def test_every_line_number_in_the_text_exists(host):
    """Line numbers outside the tables: at least a line that is no comment and not empty."""
    sglang = lab.install(host).site / "sglang"
    for file, line in re.findall(r"\(`(srt/[\w/]+\.py):(\d+)`\)", SECTIONS[host]):
        text = (sglang / file).read_text().splitlines()[int(line) - 1].strip()
        assert text
        assert not text.startswith("#"), (file, line)


@pytest.mark.parametrize("host", HOSTS)
def test_tracebacks(ask, host):
    blocks = [block for block in RAN.findall(DOCUMENT) if block[0] == host]
    assert blocks
    for _, backend, refusal, text in blocks:
        scenario = {"deep_gemm": refusal} if refusal else {}
        layer = ask(host)(layers=[{"backend": backend}], **scenario)["layers"][0]
        assert text.splitlines() == _lines(layer["error"])


def _lines(error: dict) -> list[str]:
    lines = []
    for frame in error["frames"]:
        found = re.search(r"(?:site-packages|common)/((?:sglang|flashinfer)/.*)", frame["file"])
        if found:
            lines.append(f"{found[1]}:{frame['line']} {frame['function']}")
    return [*lines, f"{error['type']}: {error['message']}"]


@pytest.mark.parametrize("capability", [(12, 0), (12, 1)], ids=str)
@pytest.mark.parametrize("host", HOSTS)
def test_settings(ask, host, capability):
    (table,) = [table for name, table in SETTINGS.findall(DOCUMENT) if name == host]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    assert len(rows) > 8
    processes: dict[str, list] = {}  # one per environment
    for setting, deep_gemm, returns, then in rows:
        env, layer = _setting(setting)
        if deep_gemm == "off":
            env["SGLANG_ENABLE_JIT_DEEPGEMM"] = "0"
        row = (layer | SMALL, returns, then)
        processes.setdefault(json.dumps(env), []).append(row)
    for env, asked in processes.items():
        layers = [layer for layer, _, _ in asked]
        scenario = {"env": json.loads(env), "deep_gemm": "recipe", "layers": layers}
        result = ask(host)(capability=capability, **scenario)
        for seen, (_, returns, then) in zip(result["layers"], asked, strict=True):
            _holds(seen, returns, then)


def _holds(seen: dict, returns: str, then: str) -> None:
    """Assert that a layer did what a row's last two cells say."""
    if not returns:
        assert seen["stage"] == "load", seen
        assert then.startswith(seen["error"]["type"]), seen
        return
    name = seen["dispatch"]["stock"].removesuffix("_with_fallback")
    assert f"`{name.removesuffix('_w8a8_block_fp8_linear')}`" == returns, seen
    if "in the first forward" in then:
        assert seen["stage"] == "apply", seen
        assert then.startswith(seen["error"]["type"]), seen


def _setting(text: str) -> tuple[dict[str, str], dict]:
    """Return environment and layer of a table's first cell: a flag or a variable."""
    flag = re.fullmatch(r"`--fp8-gemm-backend (\w+)`", text)
    if flag:
        return {}, {"backend": flag[1]}
    name, _, value = text.strip("`").partition("=")
    return {name: value}, {"backend": "auto"}
