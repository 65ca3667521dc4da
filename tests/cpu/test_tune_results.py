"""What a tuning run leaves: state and table outlive broken files and changed environments."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest

from sglang_kt_sm120 import devices, env, heuristic, system
from sglang_kt_sm120.configs import store, table
from sglang_kt_sm120.tune import results

RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
DEVICE = devices.describe(RTX)
DIRECT = heuristic.Config("direct", 8, 64, num_warps=4, unroll=2, fused=True, splits=5)
MACHINE = {"sglang-kt": "0.7.2", "sgl-kernel": "0.3.21", "typer": "1"}


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv(env.CONFIG_DIR.name, str(tmp_path / "user"))
    monkeypatch.setattr(system, "versions", lambda: MACHINE)
    monkeypatch.setattr(
        system, "gpus", lambda: [{"name": RTX, "driver_version": "580.1", "power.limit": "600 W"}]
    )
    store.forget()
    yield tmp_path / "user"
    store.forget()


def header() -> dict:
    return results.header(DEVICE, "bfloat16", stand_in=False)


def case(m: int, n: int = 2112, config=DIRECT, **changes) -> dict:
    return {
        "name": "x", "n": n, "k": 7168, "m": m, "backend": "triton", "us": 80.0, "old_us": 100.0,
        "config": dataclasses.asdict(config), "effort": "full", **changes,
    }  # fmt: skip


def data(*cases: dict) -> dict:
    return results.make_table(header(), cases, {"power_limit": "600 W"})


def rows(file) -> dict[int, str | None]:
    """Return M -> backend of a file's one shape, as a server reads it."""
    parsed = table.parse(file.read_text(), DEVICE)
    assert parsed.refused == ()
    (listed,) = parsed.shapes.values()
    return {row.m: row.backend for row in listed}


# ---------------------------------------------------------------- the state


def test_a_state_of_something_else_starts_over(places):
    head = header()
    file = results.state_file(RTX, "bfloat16")
    assert results.load_state(file, head) == ({}, "")
    results.save_state(file, head, {"a": {"m": 1}})
    cases, message = results.load_state(file, head)
    assert (cases, "going on after 1" in message) == ({"a": {"m": 1}}, True)
    for change, word in (
        ({"kernels": {"direct": "0"}}, "kernels"),
        ({"gpu": {**head["gpu"], "sm_count": 1}}, "gpu"),
        ({"dtype": "float16"}, "dtype"),
        ({"method": {}}, "method"),
    ):
        cases, message = results.load_state(file, {**head, **change})
        assert cases == {}
        assert f"another {word}: starting over" in message
    file.write_text(file.read_text()[:-20])
    cases, message = results.load_state(file, head)
    assert (cases, "cannot be read" in message) == ({}, True)


def test_a_state_of_an_earlier_release_starts_over(places):
    file = results.state_file(RTX, "bfloat16")
    earlier = {name: value for name, value in header().items() if name != "setting"}
    for setting in ({}, {"setting": None}, {"setting": ["x"]}):
        store.save(file, {**earlier, **setting, "cases": {"a": {"m": 1}}})
        cases, message = results.load_state(file, header())
        assert cases == {}
        assert "another driver and torch and triton and host" in message


CHANGES = {
    "driver": lambda patch: patch.setattr(
        system, "gpus", lambda: [{"name": RTX, "driver_version": "590.2"}]
    ),
    "torch": lambda patch: patch.setattr("torch.__version__", "2.9.1"),
    "triton": lambda patch: patch.setattr("triton.__version__", "3.5.0"),
    "host": lambda patch: patch.setattr(
        system, "versions", lambda: {**MACHINE, "sgl-kernel": "0.3.22"}
    ),
    "pdl": lambda patch: patch.setenv(env.PDL.name, "0"),
    "mma": lambda patch: patch.setenv(env.MMA.name, "plain"),
    "disabled_backends": lambda patch: patch.setenv(env.DISABLED_BACKENDS.name, "flashinfer"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_times_of_two_environments_are_not_mixed(places, monkeypatch, what):
    """Each part of the setting alone starts over, with one line that names it."""
    if what == "triton":
        pytest.importorskip("triton")
    file = results.state_file(RTX, "bfloat16")
    results.save_state(file, header(), {"a": {"m": 1}})
    assert results.load_state(file, header())[0] == {"a": {"m": 1}}
    CHANGES[what](monkeypatch)
    cases, message = results.load_state(file, header())
    assert cases == {}
    assert message == f"{file} is of another {what}: starting over"


def test_a_probe_that_fails_is_part_of_the_setting_and_no_crash(places, monkeypatch):
    def broken():
        raise OSError("nvidia-smi: not found")

    monkeypatch.setattr(system, "gpus", broken)
    monkeypatch.setattr(system, "versions", broken)
    setting = results.setting(RTX)
    assert (setting["driver"], setting["host"]) == ("", "no sglang installed")


# ---------------------------------------------------------------- the table


def test_the_table_says_under_what_it_was_measured(places, monkeypatch):
    made = data(case(4))
    assert made["environment"]["driver"] == "580.1"
    assert made["environment"]["host"] == {"sglang-kt": "0.7.2", "sgl-kernel": "0.3.21"}
    assert made["environment"]["power_limit"] == "600 W"
    assert not {"setting", "dtype"} & made.keys()
    file = store.user_file(RTX)
    results.write_table(made, file)
    CHANGES["driver"](monkeypatch)
    results.write_table(data(case(8)), file)
    assert rows(file) == {4: "triton", 8: "triton"}
    written = json.loads(file.read_text())
    assert written["environment"]["driver"] == "590.2"
    first, second = written["shapes"][0]["rows"]
    assert first["environment"]["driver"] == "580.1"
    assert "environment" not in second


def spoilt(change) -> str:
    """Return a table with a row for M = 4 and one for M = 8, after `change` has seen to it."""
    made = data(case(4), case(8))
    return json.dumps(change(made, made["shapes"][0]) or made)


#: name -> (what happened to the file, rows of M = 4 and 8 that can still serve, what is said)
BROKEN = {
    "a value": (lambda t, s: s["rows"][0]["config"].update(num_warps=3), {8}, "num_warps=3"),
    "an unknown key": (lambda t, s: s["rows"][0]["config"].update(x=1), {8}, "'x'"),
    "no config": (lambda t, s: s["rows"][0].pop("config") and None, {8}, "it has no 'config'"),
    "a config that is a list": (lambda t, s: s["rows"][0].update(config=[]), {8}, "M=4"),
    "no m": (lambda t, s: s["rows"][0].pop("m") and None, {8}, "it has no 'm'"),
    "m as text": (lambda t, s: s["rows"][0].update(m="4"), {8}, "M='4': no M"),
    "m as list": (lambda t, s: s["rows"][0].update(m=[4]), {8}, "no M"),
    "a huge m": (lambda t, s: s["rows"][0].update(m=99999), {8}, "rows end at M=16384"),
    "an odd backend": (lambda t, s: s["rows"][0].update(backend="trtllm"), {8}, "trtllm"),
    "a backend that is a list": (lambda t, s: s["rows"][0].update(backend=[]), {8}, "[]"),
    "a row that is a number": (lambda t, s: s["rows"].__setitem__(0, 7), {8}, "M=7"),
    "rows out of order": (lambda t, s: s["rows"].reverse(), {4, 8}, ""),
    "rows that are none": (lambda t, s: s.update(rows=None), set(), "not iterable"),
    "no n": (lambda t, s: s.pop("n") and None, set(), "it has no 'n'"),
    "n as list": (lambda t, s: s.update(n=[2112]), set(), "n=[2112]"),
    "a dtype": (lambda t, s: s.update(dtype="int8"), set(), "int8"),
    "a shape that is text": (lambda t, s: t["shapes"].append("x"), {4, 8}, "string indices"),
    "no shapes": (lambda t, s: t.pop("shapes") and None, set(), "it is no table"),
    "no gpu": (lambda t, s: t.pop("gpu") and None, set(), "it is no table"),
    "a list": (lambda t, s: [t], set(), "it is no table"),
    "a number": (lambda t, s: 7, set(), "it is no table"),
    "another schema": (lambda t, s: t.update(schema=9), set(), "another schema"),
    "another method": (lambda t, s: t.update(method={}), set(), "another method"),
    "kernels as a list": (lambda t, s: t.update(kernels=[1]), set(), "no attribute 'get'"),
    "an old kernel": (lambda t, s: t["kernels"].update(direct="0"), set(), "direct kernel has"),
    "another old kernel": (lambda t, s: t["kernels"].update(tiled="0"), {4, 8}, ""),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_earlier_table_costs_no_new_row(places, caplog, broken):
    """Its bad rows go, with one line; the good ones and every new one are written."""
    change, good, said = BROKEN[broken]
    file = store.user_file(RTX)
    file.parent.mkdir()
    file.write_text(spoilt(change))
    results.write_table(data(case(16, config=dataclasses.replace(DIRECT, block_m=16))), file)
    assert rows(file) == dict.fromkeys([*sorted(good), 16], "triton")
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(lines) == (1 if said else 0)
    assert all(str(file) in line and said in line for line in lines)


@pytest.mark.parametrize("content", ["", "{", b"\xff\xfe", "[" * 100_000])
def test_an_earlier_file_that_is_no_json_is_replaced(places, caplog, content):
    file = store.user_file(RTX)
    file.parent.mkdir()
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    results.write_table(data(case(4)), file)
    assert rows(file) == {4: "triton"}
    assert "the file cannot be read" in caplog.text


def test_a_new_row_that_a_server_would_refuse_is_left_out(places, caplog):
    bad = case(8, config=dataclasses.replace(DIRECT, num_warps=3))
    file = store.user_file(RTX)
    with pytest.raises(table.BadTable, match="num_warps"):
        results.write_table(data(bad), file)
    assert not file.exists()
    results.write_table(data(case(4), bad, case(20000, backend=None, config=DIRECT)), file)
    assert rows(file) == {4: "triton"}
    assert "new rows are left out: N=2112 K=7168 M=8: num_warps=3" in caplog.text
    assert "(and 1 more)" in caplog.text
