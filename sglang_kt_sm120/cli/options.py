"""What the commands share: the program's consoles, exit codes, options and how they are read."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Annotated, Any

import typer

from sglang_kt_sm120 import devices
from sglang_kt_sm120.cli.output import print_error, print_failure, print_note

EXIT_PROBLEM, EXIT_USAGE, EXIT_NO_GPU = 1, 2, 3
DEFAULT_SET = "deepseek-r1"

#: How activation dtypes may be spelled; serving, tables and `--json` use the long names.
DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}
DTYPE_HELP = "Of the activations: bf16 or fp16 (bfloat16, float16)."

JsonOption = Annotated[
    bool, typer.Option("--json", is_eager=True, help="Print one JSON object, errors included.")
]
DtypeOption = Annotated[str, typer.Option(help=DTYPE_HELP)]
ModelOption = Annotated[str | None, typer.Option(help="A model's folder or config.json.")]
ShapeOption = Annotated[list[str], typer.Option(help="N,K of one layer; may be repeated.")]
SetOption = Annotated[
    str | None, typer.Option("--set", help=f"A named set of shapes (default: {DEFAULT_SET}).")
]
TpOption = Annotated[int, typer.Option(min=1, help="Tensor-parallel size (for --model and --set).")]
GpuOption = Annotated[
    str | None,
    typer.Option(
        help=f"A GPU's name ({', '.join(gpu.pattern for gpu in devices.GPUS)}; an edition's whole "
        "name); the card itself is not needed then."
    ),
]


def fail(message: str, code: int) -> typer.Exit:
    """Print an error to stderr, with --json to stdout too; return the exit to raise."""
    print_error(message)
    print_failure(message)
    return typer.Exit(code)


def bad(option: str, message: str) -> typer.BadParameter:
    """Return the error of a value that `option` does not take; it ends with EXIT_USAGE."""
    return typer.BadParameter(message, param_hint=option)


def parse_dtype(text: str) -> str:
    """Return "bfloat16" or "float16"; typer.BadParameter where `text` is no spelling of either."""
    try:
        return DTYPES[text.lower()]
    except KeyError:
        raise bad("--dtype", f"{text!r}: expected {', '.join(DTYPES)}") from None


def parse_shape(text: str):
    """Return the Linear that "N,K" names; typer.BadParameter where it is none."""
    from sglang_kt_sm120.shapes import Linear

    try:
        n, k = (int(part) for part in text.lower().replace("x", ",").split(","))
        if n <= 0 or k <= 0 or k % 128:
            raise ValueError
    except ValueError:
        raise bad(
            "--shape", f"{text!r}: expected N,K with K a multiple of 128, such as 2112,7168"
        ) from None
    return Linear(f"{n}x{k}", n, k)


def parse_ms(text: str, option: str = "--m", least: int = 1) -> list[int]:
    """Return the numbers of rows in "1,16,4096", each once; typer.BadParameter where it has none.

    `option` is what they were given by, `least` the smallest that it takes.
    """
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise bad(option, f"{text!r}: expected numbers of rows such as 1,16,4096") from None
    if min(values) < least:
        raise bad(option, f"{text!r}: rows start at {least}")
    return list(dict.fromkeys(values))


def linears(shape: list[str], model: str | None, shape_set: str | None, tp: int) -> list:
    """Return the layers that --shape, --model or --set name, as one of `tp` ranks holds them."""
    from sglang_kt_sm120 import models, shapes

    if (shape and (model or shape_set)) or (model and shape_set):
        raise typer.BadParameter("give one of --shape, --model and --set")
    if shape:
        if tp != 1:
            raise typer.BadParameter(
                "--tp goes with --model and --set; a --shape is taken as one rank holds it"
            )
        return [parse_shape(text) for text in shape]
    try:
        if model:
            found = models.from_model(model, note=print_note)
        else:
            found = shapes.SHAPE_SETS.get(shape_set or DEFAULT_SET)
    except OSError as error:
        text = f"{error}; it takes a local folder or config.json (a name on a hub is not looked up)"
        raise bad("--model", text) from None
    except ValueError as error:
        raise bad("--model", str(error)) from None
    if found is None:
        raise bad("--set", f"no set {shape_set!r}; there are {', '.join(shapes.SHAPE_SETS)}")
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
        advice = "; ".join(_advice(name) for name in missing)
        raise fail(
            f"this needs {' and '.join(missing)}, not installed here: {advice}", EXIT_PROBLEM
        )


def _advice(library: str) -> str:
    """Return how to get a library that is missing."""
    if library == "torch":
        return "install a build of torch for your GPU, and see `sglang-kt-sm120 doctor`"
    if library == "matplotlib":
        return "pip install matplotlib"
    if library == "triton" and importlib.util.find_spec("torch"):
        import torch

        if torch.version.cuda:  # a second Triton beside torch's own would be an accident
            return "triton comes with torch's CUDA builds: reinstall torch"
        return "pip install triton (this torch is a build without CUDA, which brings none)"
    if library == "triton":
        return "it comes with torch's CUDA builds; beside a CPU build of torch, pip install triton"
    return f"pip install {library}"


def need_gpu() -> None:
    """End the command, with exit code 3, where torch sees no CUDA device."""
    need("torch")
    import torch

    if not torch.cuda.is_available():
        raise fail(
            "this needs a CUDA device, and torch sees none here; `sglang-kt-sm120 doctor` says why",
            EXIT_NO_GPU,
        )
    need("triton")


def gpu_to_run_on() -> int:
    """Make the first SM12x GPU current and return its index; without any the current one's.

    A note says so then. Ends the command as `need_gpu` does where there is no GPU at all.
    """
    need_gpu()
    import torch

    index = devices.first_sm120()
    if index is None:
        index = torch.cuda.current_device()
        print_note(
            f"no SM120 GPU here: this runs on {torch.cuda.get_device_name(index)}, with its own "
            "kernels, and says nothing about one"
        )
    torch.cuda.set_device(index)
    return index


def asked_device(gpu: str | None, *, or_cpu: bool = False):
    """Return the `select.Device` that --gpu names, or this machine's first SM12x GPU.

    `or_cpu`: without a GPU, the CPU where SGLANG_KT_SM120_TEST_CAPABILITY makes it serve.
    """
    if gpu:
        try:
            return devices.describe(gpu)
        except ValueError as error:
            raise bad("--gpu", str(error)) from None
    need("torch")
    import torch

    index = devices.first_sm120()
    if index is not None:
        return devices.device(index)
    if or_cpu and not torch.cuda.is_available() and devices.is_sm120(devices.capability(None)):
        return devices.device(None)
    raise fail(
        'no SM120 GPU here; name one, as in --gpu "NVIDIA RTX PRO 6000 Blackwell Server Edition"',
        EXIT_NO_GPU,
    )
