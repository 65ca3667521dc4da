"""Run `sglang-kt-sm120` in this process, for tests of what it prints and how it ends."""

from __future__ import annotations

import torch
from typer.testing import CliRunner

from sglang_kt_sm120 import cli, devices, env, host

RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
runner = CliRunner()


def pretend_gpus(monkeypatch, *gpus: tuple[str, tuple[int, int]]) -> list[int]:
    """Let torch see these GPUs, by name and capability; return what is made current, in order."""
    made_current: list[int] = []
    monkeypatch.delenv(env.TEST_CAPABILITY.name, raising=False)
    monkeypatch.setattr(host, "offer_cutlass", lambda: None)  # no real sglang on a GPU of straw
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: (made_current or [0])[-1])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: gpus[index][0])
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    monkeypatch.setattr(devices, "_real_capability", lambda index: gpus[index][1])
    facts = [devices.describe(name, capability=seen, sm_count=100) for name, seen in gpus]
    monkeypatch.setattr(devices, "device", facts.__getitem__)
    return made_current


def run(*arguments: str, code: int = 0):
    """Return typer's result of the command; it must end with `code`."""
    result = runner.invoke(cli.app, list(arguments))
    assert result.exit_code == code, result.output
    return result
