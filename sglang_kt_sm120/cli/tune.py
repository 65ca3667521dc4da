"""The command that searches: tune."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from sglang_kt_sm120.cli.options import (
    EXIT_PROBLEM,
    DtypeOption,
    JsonOption,
    ModelOption,
    SetOption,
    ShapeOption,
    TpOption,
    fail,
    linears,
    need_gpu,
    parse_dtype,
    parse_ms,
)
from sglang_kt_sm120.cli.output import err, out, print_json, print_note, progress, table

UNITS = {"s": 1, "": 1, "m": 60, "h": 3600}


def tune(
    model: ModelOption = None,
    shape: ShapeOption = [],  # noqa: B006
    shape_set: SetOption = None,
    tp: TpOption = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="90 s: ours as it is against the host's CUTLASS.")
    ] = False,
    m: Annotated[
        str | None, typer.Option(help="Rows, separated by commas (default: 18 from 1 to 8192).")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Time to spend, such as 90s or 10m (default: 10m).")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget earlier runs instead of going on.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compilations at a time (default: half the cores).")
    ] = None,
    dtype: DtypeOption = "bfloat16",
    share: Annotated[
        Path | None, typer.Option(help="Write the result there, for a pull request.")
    ] = None,
    credit: Annotated[
        str, typer.Option(help="Who shares it: a name that `explain` will print.")
    ] = "anonymous",
    export_sglang: Annotated[
        Path | None,
        typer.Option(help="Tune sglang's own Triton kernel instead; write its files there."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest kernels for a model on this GPU and write a tuned table. Resumable."""
    from sglang_kt_sm120 import select, shapes, tune
    from sglang_kt_sm120.configs import table as tables

    layers = shapes.unique(linears(shape, model, shape_set, tp))
    ms = parse_ms(m) if m is not None else list(tune.QUICK_MS if quick else tune.MS)
    if not 1 <= min(ms) <= max(ms) <= tables.MAX_M:
        raise typer.BadParameter(f"--m: rows from 1 to {tables.MAX_M}")
    if not export_sglang:  # what decides them is what has to be timed
        if between := [one for one in ms if select.bucket(one) != one]:
            print_note(f"M={between[0]} is decided as M={select.bucket(between[0])}: that is timed")
        ms = [select.bucket(one) for one in ms]
    dtype = parse_dtype(dtype)
    seconds = _seconds(budget, tune.QUICK_BUDGET if quick else tune.BUDGET)
    if export_sglang and (share or quick):
        raise typer.BadParameter("--export-sglang goes with neither --share nor --quick")
    for place in (share and share.parent, export_sglang):
        if place and not place.is_dir():  # minutes of timing must not end in an error
            raise typer.BadParameter(f"{place} is no folder")
    need_gpu()
    run = _run_stock if export_sglang else _run
    try:
        done = run(
            layers, list(dict.fromkeys(ms)), seconds, dtype, quick=quick, fresh=fresh,
            jobs=jobs, share=share, credit=credit, export=export_sglang,
        )  # fmt: skip
    except OSError as error:
        raise fail(f"cannot write: {error}; SGLANG_KT_SM120_CONFIG_DIR moves it", 1) from None
    except (RuntimeError, ValueError) as error:
        raise fail(str(error), EXIT_PROBLEM) from None
    ok = done["ended"] != "interrupted" and not done["failures"]
    if as_json:
        print_json(ok, **done)
    else:
        _print(done, stock=bool(export_sglang))
    raise typer.Exit(0 if ok else EXIT_PROBLEM)


def _seconds(text: str | None, default: float) -> float:
    if text is None:
        return default
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    if not match or not float(match[1]):
        raise typer.BadParameter(f"--budget {text!r}: expected a time such as 90s, 10m or 1h")
    return float(match[1]) * UNITS[match[2]]


def _start(dtype: str, fresh: bool, kind: str = ""):
    """Return (bench, header, state file, finished cases) of this machine's first SM12x GPU.

    `kind` tells the states of different searches apart.
    """
    import torch

    from sglang_kt_sm120 import env
    from sglang_kt_sm120.tune import gpu, results

    if env.BACKEND.get() != "auto":
        raise ValueError(f"{env.BACKEND.name} forces one backend: unset it to tune")

    ours = (i for i in range(torch.cuda.device_count()) if not gpu.is_stand_in(i))
    index = next(ours, 0)
    torch.cuda.set_device(index)
    bench = gpu.GpuBench(
        index, getattr(torch, dtype), say=lambda text: err.print(escape(text), highlight=False)
    )
    head = results.header(bench.device, dtype, gpu.is_stand_in(index))
    state = results.state_file(bench.device.name, f"{kind}{dtype}")
    cases, message = ({}, "") if fresh else results.load_state(state, head)
    if message:
        err.print(escape(message), highlight=False)
    if gpu.is_stand_in(index):
        err.print("[yellow]not an SM12x GPU:[/] the table will serve this very GPU only")
    return bench, head, state, cases


def _facts() -> dict[str, Any]:
    from sglang_kt_sm120 import bench
    from sglang_kt_sm120.tune import results

    return results.environment(bench.environment())


def _run(layers, ms, seconds, dtype, *, quick, fresh, jobs, share, credit, export) -> dict:
    """Tune our side and write the table, whatever ends the run; return what --json prints."""
    from sglang_kt_sm120.configs import store
    from sglang_kt_sm120.tune import compiling, engine, gpu, results

    bench, head, state, cases = _start(dtype, fresh)
    if share:  # minutes of timing must not end in an error
        results.check_sharing(head["method"], head["setting"]["host"], credit)
    builds = compiling.Compilers(
        bench.device, gpu.real_capability(bench.index),
        lambda config: gpu.arch_of_variant(bench.index, config), bench.pdl, dtype, jobs,
    )  # fmt: skip
    with contextlib.closing(builds), _progress(builds.progress) as notify:
        tuner = engine.Tuner(
            bench.device, bench, builds, budget=seconds, quick=quick, notify=notify
        )
        outcome = tuner.run(layers, ms, cases, lambda: results.save_state(state, head, cases))
    facts = _facts()
    data = results.make_table(head, cases.values(), facts)
    file = store.user_file(bench.device.name)
    written = results.write_table(data, file) if cases else data
    store.forget()
    wanted = {engine.key(s.n, s.k, m) for s in layers for m in ms}
    mine = [cases[name] for name in cases if name in wanted]
    picture = _draw(file.with_suffix(".png"), mine) if mine else ""
    if share:
        store.save(share, results.shared(written, credit))
    return {
        "ended": outcome.ended, "device": head["gpu"], "environment": facts,
        "method": head["method"], "table": str(file) if cases else None, "state": str(state),
        "picture": picture, "share": str(share) if share else None, "of": len(wanted),
        "distance": engine.distance(mine), "cases": mine, "failures": outcome.failures,
    }  # fmt: skip


def _run_stock(layers, ms, seconds, dtype, *, fresh, export, **_) -> dict:
    """Tune sglang's own kernel and write its files; return what --json prints."""
    from sglang_kt_sm120 import host
    from sglang_kt_sm120.tune import results, sglang_files

    if "stock" not in host.linear_functions():
        raise RuntimeError(
            "--export-sglang times sglang's own Triton kernel, and no sglang imports here: run it "
            "in the environment that serves"
        )
    bench, head, state, cases = _start(dtype, fresh, "sglang-")
    with _progress() as notify:
        outcome = sglang_files.search(
            bench.time, layers, ms, cases, budget=seconds, notify=notify,
            shared_bytes=bench.device.shared_bytes,
            save=lambda: results.save_state(state, head, cases),
        )  # fmt: skip
    # A file holds every finished M of a layer; which layers, and what is listed, was asked for.
    asked = {(layer.n, layer.k) for layer in layers}
    written = [case for case in cases.values() if (case["n"], case["k"]) in asked]
    files = sglang_files.write(export, written, bench.device.name)
    wanted = {sglang_files.key(layer, m) for layer in layers for m in ms}
    mine = [cases[name] for name in cases if name in wanted]
    return {
        "ended": outcome.ended, "device": head["gpu"], "environment": _facts(),
        "files": [str(file) for file in files], "state": str(state),
        "of": len(wanted), "cases": mine, "failures": outcome.failures,
    }  # fmt: skip


@contextlib.contextmanager
def _progress(compiled: Callable[[], tuple[int, int]] = lambda: (0, 0)):
    """Show two bars, cases and the running case; yield what the tuner tells its events."""
    from rich.progress import BarColumn, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
    with progress(*columns) as bars:
        outer = bars.add_task("cases", total=None, count="")
        inner = bars.add_task("", total=1.0, count="")

        def notify(event) -> None:
            ready, asked = compiled()
            text = f"{event.shape.n}x{event.shape.k} M={event.m}"
            compiling = f", {ready}/{asked} compiled" if ready < asked else ""
            bars.update(
                outer, completed=event.done, total=event.total, description=f"cases{compiling}",
                count=f"{event.done}/{event.total}, {event.left:.0f} s of the budget left",
            )  # fmt: skip
            best = f": {event.best}" if event.best else ""
            ratio = f" {event.ratio:.3f} of old" if event.ratio else ""
            bars.update(
                inner, completed=event.part, count=f"{event.tried} tried",
                description=f"{text} {event.step}{best}{ratio}",
            )  # fmt: skip

        yield notify


def _brief(case: dict) -> str:
    """Return who serves from now on, in a few words; --json has the whole configuration."""
    if case["backend"] is None:
        return "kept"
    config = case["config"] or {}
    if case["backend"] != "triton":
        brief = f"{case['backend']} {config.get('kernel', '')}"
        same = {name: case[name] for name in ("backend", "config")} == case["old"]
        return f"{brief}: kept, over ours" if same else brief
    tile = f"{config['block_m']}x{config['block_n']}"
    brief = f"{config['kernel']} {tile} {config['num_warps']}w"
    return brief + (f" x{config['splits']}" if config["splits"] > 1 else "")


def _print(done: dict[str, Any], stock: bool) -> None:
    shown = table("layer", "N,K", "M", "old us", "new us", "gain", "", whole=("N,K", "M"))
    for case in sorted(done["cases"], key=lambda case: (case["n"], case["k"], case["m"])):
        gain = 1 - case["us"] / case["old_us"]
        brief = str(tuple(case["config"].values())) if stock else _brief(case)
        shown.add_row(
            case["name"], f"{case['n']},{case['k']}", str(case["m"]), f"{case['old_us']:.2f}",
            f"{case['us']:.2f}", f"{gain:.1%}" if gain > 0 else "", escape(brief),
        )  # fmt: skip
    shown.show()
    finished = sum(case.get("effort") != "cut" for case in done["cases"])
    of = done["of"]
    if finished < of:
        why = {"budget": "the time is up", "interrupted": "interrupted"}.get(done["ended"], "")
        more = "run the same command again to go on"
        out.print(f"\n{finished} of {of} cases done{f' ({why})' if why else ''}: {more}")
    distance = done.get("distance", {})
    if distance.get("cases"):
        out.print(
            f"\nthe built-in heuristic is {distance['mean'] - 1:.1%} from the best found "
            f"(geometric mean of {distance['cases']} cases), {distance['worst'] - 1:.1%} at worst"
        )
    for failure in done["failures"]:
        err.print(f"[red]not tuned:[/] {escape(failure)}")
    if any("OutOfMemoryError" in failure for failure in done["failures"]):
        err.print("is a server running on this GPU? Stop it first: it takes memory, and time")
    for name in ("table", "state", "picture", "share"):
        if done.get(name):
            out.print(f"{name}: {escape(str(done[name]))}")
    for file in done.get("files", ()):
        out.print(escape(file))


def _draw(file: Path, cases: list[dict]) -> str:
    """Draw old and new times of each layer against M; return the file, or why there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return 'none: matplotlib is not installed; pip install "sglang-kt-sm120[plot]"'
    layers = sorted({(case["n"], case["k"]) for case in cases})
    columns = min(4, len(layers))
    figure = Figure(figsize=(4 * columns, 3 * -(-len(layers) // columns)), layout="tight")
    axes = figure.subplots(-(-len(layers) // columns), columns, squeeze=False).flatten()
    for axis, (n, k) in zip(axes, layers, strict=False):
        points = sorted(
            (case["m"], case["old_us"], case["us"])
            for case in cases
            if (case["n"], case["k"]) == (n, k)
        )
        ms, before, after = zip(*points, strict=True)
        axis.plot(ms, before, marker="o", label="old")
        axis.plot(ms, after, marker="x", label="tuned")
        axis.set(title=f"{n}x{k}", xscale="log", yscale="log", xlabel="M", ylabel="us")
        axis.legend(fontsize="small")
    figure.savefig(file, dpi=120)
    return str(file)
