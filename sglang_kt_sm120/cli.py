"""The command line; the only module that imports typer and rich.

Data goes to stdout, progress and errors to stderr. Exit codes: 0 ok, 1 a problem was found,
2 usage, 3 this needs a GPU.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_kt_sm120 import __version__, env

SCHEMA = 1
EXIT_PROBLEM, EXIT_USAGE, EXIT_NO_GPU = 1, 2, 3
STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
MARKS = {"ok": "✓", "warn": "!", "fail": "✗"}

out, err = Console(soft_wrap=False), Console(stderr=True)
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Block-FP8 linear layers on SM120/SM121 GPUs for sglang-kt and sglang.",
)
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def main() -> None:
    """Console script `sglang-kt-sm120`."""
    app()


def fail(message: str, code: int) -> typer.Exit:
    """Print an error to stderr and return the exit to raise."""
    err.print(f"[red]error:[/] {escape(message)}")
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


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    as_json: JsonOption = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the check that imports sglang (seconds).")
    ] = False,
) -> None:
    """Check this machine: GPU, torch, Triton, who owns sglang/, and whether the hook is live."""
    from sglang_kt_sm120 import doctor, system

    with err.status("looking at this machine"):
        facts = system.facts()
        rows = doctor.rows(facts, None if quick else system.seam)
    code = doctor.exit_code(rows)
    if as_json:
        print_json(code == 0, checks=[dataclasses.asdict(row) for row in rows], facts=facts)
        raise typer.Exit(code)
    shown = table("", "check", "seen", "what to do")
    for row in rows:
        mark = f"[{STYLES[row.status]}]{MARKS[row.status]}[/]"
        shown.add_row(mark, row.check, escape(row.value), escape(row.fix))
    out.print(shown)
    verdict = {0: "ready", EXIT_NO_GPU: "no GPU here"}.get(code, "not ready")
    out.print(f"\nsglang-kt-sm120 {__version__}: [{'green' if code == 0 else 'red'}]{verdict}[/]")
    raise typer.Exit(code)


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
        if model:
            found = shapes.from_model(model)
        else:
            found = shapes.SHAPE_SETS[shape_set or "deepseek-r1"]
    except KeyError:
        known = ", ".join(shapes.SHAPE_SETS)
        raise typer.BadParameter(f"no shape set {shape_set!r}; there are {known}") from None
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
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


def asked_device(gpu: str | None):
    """Return the `select.Device` that --gpu names, or this machine's first SM12x GPU."""
    from sglang_kt_sm120 import devices

    if gpu:
        try:
            return devices.describe(gpu)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    import torch

    for index in range(torch.cuda.device_count()):
        if devices.is_sm120(devices.capability(index)):
            return devices.device(index)
    raise fail(
        'no SM120 GPU here; name one, as in --gpu "NVIDIA RTX PRO 6000 Blackwell Server Edition"',
        EXIT_NO_GPU,
    )


@app.command()
def explain(
    shape: Annotated[list[str], typer.Option(help="N,K of one layer; may be repeated.")] = [],  # noqa: B006
    model: Annotated[str | None, typer.Option(help="A model's folder or config.json.")] = None,
    shape_set: Annotated[
        str | None, typer.Option("--set", help="A named set of shapes [default: deepseek-r1].")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    m: Annotated[str, typer.Option(help="Rows, separated by commas.")] = "1,16,64,512,4096",
    gpu: Annotated[str | None, typer.Option(help="A GPU's name; no GPU is needed then.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    host_cutlass: Annotated[
        bool, typer.Option(help="Assume that the host's CUTLASS was proven at load.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say which kernel a layer will use, and why no other; prints what the op itself routes by."""
    from sglang_kt_sm120 import select

    if dtype not in ("bfloat16", "float16"):
        raise typer.BadParameter(f"{dtype!r}: expected bfloat16 or float16")
    layers, ms = linears(shape, model, shape_set, tp), parse_ms(m)
    device = asked_device(gpu)
    proven = None if host_cutlass else "not proven: it is compared with ours on the layer at load"
    columns = ("layer", "N,K", "M", "backend", "configuration")
    rows, shown = [], table(*columns, title=device.name, whole=columns[:4])
    for layer in layers:
        for rows_of_x in ms:
            problem = select.Problem(select.bucket(max(rows_of_x, 1)), layer.n, layer.k, dtype)
            try:
                choice = select.choose(problem, device, proven)
            except select.NoBackend as error:
                raise fail(str(error), EXIT_PROBLEM) from None
            config = dataclasses.asdict(choice.config) if choice.config else None
            rows.append(
                {
                    "name": layer.name, "n": layer.n, "k": layer.k, "m": rows_of_x,
                    "backend": choice.backend, "config": config, "source": choice.evidence,
                    "reason": choice.reason, "rejected": choice.rejected,
                }
            )  # fmt: skip
            brief = " ".join(f"{key}={value}" for key, value in unusual(choice.config).items())
            shown.add_row(layer.name, f"{layer.n},{layer.k}", str(rows_of_x), choice.backend, brief)
    if as_json:
        print_json(True, device=dataclasses.asdict(device), rows=rows)
        return
    out.print(shown)
    out.print("\n[bold]why[/]")
    for row in {(row["backend"], row["reason"]): row for row in rows}.values():
        out.print(f"  {row['backend']}: {escape(row['reason'])} ({row['source']})")
    out.print("\n[bold]not taken[/] (first row)")
    for name, why in rows[0]["rejected"].items():
        out.print(f"  {name}: {escape(why)}")


@app.command()
def graphs(
    model: Annotated[str | None, typer.Option(help="A model's folder or config.json.")] = None,
    shape: Annotated[list[str], typer.Option(help="N,K of one layer; may be repeated.")] = [],  # noqa: B006
    shape_set: Annotated[
        str | None, typer.Option("--set", help="A named set of shapes [default: deepseek-r1].")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    bs: Annotated[
        str | None, typer.Option(help="Batch sizes [default: sglang's own list, 1 to 256].")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Capture CUDA graphs of a model's layers, replay them, and compare with eager bit for bit."""
    import torch
    from rich.progress import Progress

    if not torch.cuda.is_available():
        raise fail("this needs a CUDA device, and torch sees none here", EXIT_NO_GPU)
    from sglang_kt_sm120 import graphs

    layers = linears(shape, model, shape_set, tp)
    sizes = parse_ms(bs) if bs else graphs.sglang_batch_sizes(256)
    if min(sizes) < 1:
        raise typer.BadParameter("batch sizes start at 1")
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    with Progress(console=err, transient=True) as progress:
        task = progress.add_task("capturing", total=len(sizes))
        for row in graphs.check(layers, sizes, device):
            rows.append(row)
            progress.update(task, advance=1, description=f"captured batch size {row.bs}")
    ok = all(row.equal for row in rows)
    if as_json:
        name = torch.cuda.get_device_name(device)
        print_json(ok, device=name, rows=[dataclasses.asdict(row) for row in rows])
        raise typer.Exit(0 if ok else EXIT_PROBLEM)
    columns = ("batch size", "kernels per graph", "capture ms", "pool MiB", "replay us", "equal")
    shown = table(*columns, title=torch.cuda.get_device_name(device))
    for row in rows:
        kernels = "?" if row.kernels is None else str(row.kernels)
        mark = "[green]✓[/]" if row.equal else "[red]✗[/]"
        numbers = (f"{row.capture_ms:.2f}", f"{row.pool_mib:.1f}", f"{row.replay_us:.1f}")
        shown.add_row(str(row.bs), kernels, *numbers, mark)
    out.print(shown)
    for row in rows:
        for failure in row.failures:
            err.print(f"[red]batch size {row.bs}:[/] {escape(failure)}")
    raise typer.Exit(0 if ok else EXIT_PROBLEM)


@app.command()
def warm(
    model: Annotated[str | None, typer.Option(help="A model's folder or config.json.")] = None,
    shape: Annotated[list[str], typer.Option(help="N,K of one layer; may be repeated.")] = [],  # noqa: B006
    shape_set: Annotated[
        str | None, typer.Option("--set", help="A named set of shapes [default: deepseek-r1].")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    gpu: Annotated[str | None, typer.Option(help="A GPU's name; no GPU is needed then.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Compilations at a time.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Compile a model's kernels into Triton's cache ahead of serving, also without a GPU."""
    from rich.progress import Progress

    layers, device = linears(shape, model, shape_set, tp), asked_device(gpu)
    from sglang_kt_sm120 import ahead, devices, system

    arch = devices.arch_of(seen=device.capability, real=device.capability)
    kernels = []
    with Progress(console=err, transient=True) as progress:
        task = progress.add_task("compiling", total=None)
        found = ahead.compile_all(layers, device, arch, env.PDL.get(), jobs=jobs)
        for done, total, item in found:
            kernels.append(dataclasses.asdict(item))
            progress.update(task, completed=done, total=total)
    if as_json:
        print_json(True, cache=str(system.triton_cache()), kernels=kernels)
        return
    out.print(f"{len(kernels)} kernel variants for {device.name} in {system.triton_cache()}")


@app.command("env")
def env_command(
    as_json: JsonOption = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/environment.md.")
    ] = False,
) -> None:
    """List every environment variable with its value, default and meaning."""
    import os

    rows = [
        {
            "name": v.name,
            "value": os.environ.get(v.name),
            "default": v.default,
            "allowed": v.allowed,
            "help": v.help,
        }
        for v in env.VARIABLES
    ]
    if as_json:
        print_json(True, variables=rows)
        return
    if markdown:
        typer.echo(
            "# Environment variables\n\nMade by `make docs` from `sglang_kt_sm120/env.py`.\n"
        )
        typer.echo("| variable | default | allowed | meaning |\n|---|---|---|---|")
        for row in rows:
            default = f"`{row['default']}`" if row["default"] else "empty"
            typer.echo(f"| `{row['name']}` | {default} | {row['allowed']} | {row['help']} |")
        return
    shown = table("variable", "value", "default", "meaning", whole=("variable",))
    for row in rows:
        value = "" if row["value"] is None else row["value"]
        shown.add_row(row["name"], value, row["default"], f"{row['help']} ({row['allowed']})")
    out.print(shown)
