"""What the commands share: the program's consoles, exit codes, options and how they are read."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

SCHEMA = 1
EXIT_PROBLEM, EXIT_USAGE, EXIT_NO_GPU = 1, 2, 3
DEFAULT_SET = "deepseek-r1"

out, err = Console(soft_wrap=False), Console(stderr=True)

_json = False  # whether the running command prints JSON: its errors do then too


def _note_json(wanted: bool) -> bool:
    global _json
    _json = wanted
    return wanted


JsonOption = Annotated[
    bool,
    typer.Option("--json", callback=_note_json, is_eager=True, help="Print one JSON object."),
]
ModelOption = Annotated[str | None, typer.Option(help="A model's folder or config.json.")]
ShapeOption = Annotated[list[str], typer.Option(help="N,K of one layer; may be repeated.")]
SetOption = Annotated[
    str | None, typer.Option("--set", help=f"A named set of shapes (default: {DEFAULT_SET}).")
]
TpOption = Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")]
GpuOption = Annotated[
    str | None, typer.Option(help="A GPU's name; the card itself is not needed then.")
]


def fail(message: str, code: int) -> typer.Exit:
    """Print an error to stderr and return the exit to raise."""
    err.print(f"[red]error:[/] {escape(message)}")
    if _json:
        print_json(False, error=message, rows=[])
    return typer.Exit(code)


def print_json(ok: bool, **lists: Any) -> None:
    """Print the stable form of every command: one object with schema, ok and a list."""
    typer.echo(json.dumps({"schema": SCHEMA, "ok": ok, **lists}, indent=1))


def table(*columns: str, title: str | None = None, whole: tuple[str, ...] = ()) -> Table:
    """Return an empty table in the style of this program; columns in `whole` are never folded."""
    made = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold", no_wrap=column in whole)
    return made


def parse_shape(text: str):
    """Return the Linear that "N,K" names; typer.BadParameter where it is none."""
    from sglang_kt_sm120.shapes import Linear

    try:
        n, k = (int(part) for part in text.lower().replace("x", ",").split(","))
        if n <= 0 or k <= 0 or k % 128:
            raise ValueError
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: expected N,K with K a multiple of 128, such as 2112,7168"
        ) from None
    return Linear(f"{n}x{k}", n, k)


def parse_ms(text: str) -> list[int]:
    """Return the batch sizes in "1,16,4096"; typer.BadParameter where they are none."""
    try:
        values = [int(part) for part in text.split(",")]
        if min(values) < 0:
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected numbers of rows such as 1,16,4096") from None
    return values


def linears(shape: list[str], model: str | None, shape_set: str | None, tp: int) -> list:
    """Return the layers that --shape, --model or --set name, as one of `tp` ranks holds them."""
    from sglang_kt_sm120 import shapes

    if (shape and (model or shape_set)) or (model and shape_set):
        raise typer.BadParameter("give one of --shape, --model and --set")
    if shape:
        return [parse_shape(text) for text in shape]
    try:
        found = (
            shapes.from_model(model) if model else shapes.SHAPE_SETS.get(shape_set or DEFAULT_SET)
        )
    except OSError as error:
        raise typer.BadParameter(f"{error}; --model takes a local folder or config.json") from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if found is None:
        known = ", ".join(shapes.SHAPE_SETS)
        raise typer.BadParameter(f"no shape set {shape_set!r}; there are {known}")
    try:
        return shapes.shard(found, tp)
    except ValueError as error:
        fitting = ", ".join(map(str, shapes.fitting_tp(found)))
        raise fail(f"{error}. Tensor-parallel sizes that fit: {fitting}", EXIT_PROBLEM) from None


def unusual(config) -> dict[str, Any]:
    """Return the fields of a launch configuration that differ from their defaults."""
    if config is None:
        return {}
    fields = dataclasses.fields(config)
    return {f.name: v for f in fields if (v := getattr(config, f.name)) != f.default}


def need(*libraries: str) -> None:
    """End the command with what to install where a library that it needs is missing."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise fail(
            f"this needs {' and '.join(missing)}, which this Python does not have; install a build "
            "of torch for your GPU (triton comes with it), and see `sglang-kt-sm120 doctor`",
            EXIT_PROBLEM,
        )


def need_gpu() -> None:
    """End the command, with exit code 3, where torch sees no CUDA device."""
    need("torch", "triton")
    import torch

    if not torch.cuda.is_available():
        raise fail(
            "this needs a CUDA device, and torch sees none here; `sglang-kt-sm120 doctor` says why",
            EXIT_NO_GPU,
        )


def asked_device(gpu: str | None):
    """Return the `select.Device` that --gpu names, or this machine's first SM12x GPU."""
    from sglang_kt_sm120 import devices

    if gpu:
        try:
            return devices.describe(gpu)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    need("torch")
    import torch

    for index in range(torch.cuda.device_count()):
        if devices.is_sm120(devices.capability(index)):
            return devices.device(index)
    raise fail(
        'no SM120 GPU here; name one, as in --gpu "NVIDIA RTX PRO 6000 Blackwell Server Edition"',
        EXIT_NO_GPU,
    )
