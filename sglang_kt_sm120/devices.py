"""The GPUs of this process as torch sees them, turned into `select.Device`; the test override.

Compute capability is asked of a device, never of the process: a host can hold an RTX PRO 6000
beside a 4090.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re

from sglang_kt_sm120 import env, select

logger = logging.getLogger("sglang_kt_sm120")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Data-sheet facts of one SM12x GPU, for questions that are asked without the card.

    Sources: NVIDIA's RTX Blackwell PRO whitepaper (188 SMs, 128 MB L2, 1792 GB/s for all three RTX
    PRO 6000 editions), the GeForce RTX 5090 data sheet (170 SMs, 96 MB, 1792 GB/s), and the DGX
    Spark data sheet (273 GB/s) with vLLM pull request 55180 (GB10: 48 SMs, 24 MiB L2).

    Attributes:
        pattern: What a person calls it.
        names: A regular expression of every name of this card, whole: a "Laptop GPU" or an edition
            with other memory ("RTX 5090 D v2") is another card.
    """

    pattern: str
    names: str
    gpu_class: str
    capability: tuple[int, int]
    sm_count: int
    l2_bytes: int
    bandwidth_gbs: float


GPUS = (
    Gpu(
        "RTX PRO 6000",
        r"RTX PRO 6000( Blackwell)?( Server| Workstation| Max-Q( Workstation)?)?( Edition)?",
        "rtx_pro", (12, 0), 188, 128 << 20, 1792.0,
    ),
    Gpu("RTX 5090", r"(GeForce )?RTX 5090", "geforce", (12, 0), 170, 96 << 20, 1792.0),
    Gpu("GB10", r"GB10|DGX Spark", "gb10", (12, 1), 48, 24 << 20, 273.0),
)  # fmt: skip
#: Words of a name that say what kind of GPU it is, whatever the card.
CLASSES = {"geforce": "geforce", "rtx pro": "rtx_pro"}


def describe(name: str, **measured) -> select.Device:
    """Return the facts about the GPU called `name`; what torch measured wins over the table.

    Args:
        name: A device name as `torch.cuda.get_device_name` gives it, any edition.
        **measured: Fields of `select.Device` read from the device itself.

    Raises:
        ValueError: The name is none of `GPUS` and nothing was measured.
    """
    gpu = next((gpu for gpu in GPUS if _is_called(gpu, name)), None)
    if gpu is None and "sm_count" not in measured:
        known = ", ".join(repr(gpu.pattern) for gpu in GPUS)
        raise ValueError(
            f"unknown GPU {name!r}; known without the card: {known}, and whole names such as "
            "'NVIDIA RTX PRO 6000 Blackwell Server Edition'"
        )
    facts = {}
    if gpu is not None:
        facts = {
            f.name: getattr(gpu, f.name)
            for f in dataclasses.fields(gpu)
            if f.name not in ("pattern", "names")
        }
    else:
        classes = (kind for words, kind in CLASSES.items() if words in name.lower())
        facts = {"gpu_class": next(classes, "other")}
    facts |= measured
    return select.Device(name=name, mma=_mma(facts.get("gpu_class", "other")), **facts)


def _is_called(gpu: Gpu, name: str) -> bool:
    return re.fullmatch(f"(NVIDIA )?({gpu.names})", name.strip(), re.IGNORECASE) is not None


def _mma(gpu_class: str) -> str:
    """GeForce runs FP8 with fp32 accumulation at half rate, and block-scaled FP8 at full rate."""
    asked = env.MMA.get()
    if asked != "auto":
        return asked
    return "block_scale" if gpu_class == "geforce" else "plain"


def is_sm120(capability: tuple[int, int] | None) -> bool:
    """True for 12.0 (RTX PRO 6000, RTX 5090) and 12.1 (GB10); never "major >= 10"."""
    return capability in select.SM120


def capability(index: int | None) -> tuple[int, int] | None:
    """Return the compute capability of CUDA device `index` as the plugin sees it.

    `SGLANG_KT_SM120_TEST_CAPABILITY` replaces it, also for the CPU (`index` None).
    """
    return env.TEST_CAPABILITY.get() or (None if index is None else _real_capability(index))


@functools.cache
def _real_capability(index: int) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(index)


def sm120_names() -> list[str]:
    """Return the names of the visible devices that are SM12x; `["cpu"]` under the test override."""
    import torch

    if not torch.cuda.is_available():
        return ["cpu"] if is_sm120(capability(None)) else []
    return [
        torch.cuda.get_device_name(index)
        for index in range(torch.cuda.device_count())
        if is_sm120(capability(index))
    ]


def first_sm120() -> int | None:
    """Return the index of the first visible CUDA device that is SM12x, None where there is none."""
    import torch

    indices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return next((index for index in indices if is_sm120(capability(index))), None)


@functools.cache
def device(index: int | None) -> select.Device:
    """Return the facts about CUDA device `index` (None: the CPU) that a choice depends on."""
    if index is None:
        return select.Device("cpu", capability(None) or (0, 0), 0, cuda=False)
    import torch

    properties = torch.cuda.get_device_properties(index)
    described = describe(
        properties.name,
        capability=capability(index),
        sm_count=properties.multi_processor_count,
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", 101376),
        l2_bytes=properties.L2_cache_size,
    )
    return as_this_triton_can(described)


def as_this_triton_can(device: select.Device) -> select.Device:
    """Return `device` with what the installed Triton's compiler can do for it; a line where less.

    Older ones refuse 8-token tiles (3.4) and lower `tl.dot_scaled`, or FP8 altogether, to f16
    without a word; asked by compiling, not by version. Where it cannot be asked, or cannot compile
    for the device at all, prefill is left with plain FP8; the first launch tells the rest.
    """
    try:
        from sglang_kt_sm120.aot import compiling

        target = "sm_{}{}a".format(*device.capability)
        if not compiling.assembler_knows(target):
            return dataclasses.replace(device, mma="plain")
        can = compiling.features(target)
    except Exception as error:  # no Triton, or whatever stops a compiler
        logger.warning(
            "sglang-kt-sm120: Triton could not be asked what it can do for %s (%s: %s); prefill "
            "takes plain FP8", device.name, type(error).__name__, error,
        )  # fmt: skip
        return dataclasses.replace(device, mma="plain")
    if not can.fp8:
        logger.warning(
            "sglang-kt-sm120: this Triton has no FP8 instructions for %s and multiplies in f16: "
            "right, and slower from 32 rows on; a newer triton would mend that", device.name,
        )  # fmt: skip
    if device.mma == "block_scale" and not can.block_scale:
        logger.warning(
            "sglang-kt-sm120: this Triton has no block-scaled FP8 for %s: prefill takes plain FP8, "
            "at half the rate on GeForce; a newer triton would mend that", device.name,
        )  # fmt: skip
        device = dataclasses.replace(device, mma="plain")
    return dataclasses.replace(device, tokens=can.tokens)


def arch(index: int | None) -> str | None:
    """Return Triton's `arch` launch option for device `index`, or None for the device's own."""
    if index is None:
        return None
    return arch_of(seen=capability(index), real=_real_capability(index))


def arch_of(seen: tuple[int, int], real: tuple[int, int]) -> str | None:
    """Return Triton's `arch` launch option for a device of capability `real` presented as `seen`.

    GB10 (12.1) takes the SM120 lowering, because Triton 3.6 and 3.7 lower FP8 for 121 to f16 HMMA.
    So does another GPU that a test presents as SM12x.
    """
    return "sm120" if is_sm120(seen) and real != (12, 0) else None
