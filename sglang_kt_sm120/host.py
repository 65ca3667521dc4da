"""The two seams through which this package reaches into sglang.

Seam one, at construction: `fp8_utils.dispatch_w8a8_block_fp8_linear()` says which function a layer
will call. It exists in every release from sglang 0.5.5 and sglang-kt 0.5.2 on, and runs in the
layer's `__init__`, where there is no weight and no device yet.
Seam two, at load: `process_weights_after_loading(layer)` of `Fp8LinearMethod` and of
compressed-tensors' `CompressedTensorsW8A8Fp8`, where both are known; it runs on reloads too.

Eras are told apart by what a module holds, never by a version: sglang-kt reports 0.0.0.dev0.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
import traceback
from collections.abc import Callable

from sglang_kt_sm120 import __version__, env, request
from sglang_kt_sm120._startup import TARGETS

logger = logging.getLogger("sglang_kt_sm120")

FP8_UTILS, FP8, COMPRESSED_TENSORS = TARGETS
DISPATCH = "dispatch_w8a8_block_fp8_linear"
#: Module, class and the layer's scale attribute of each method whose weights we prepare.
METHODS = (
    (FP8, "Fp8LinearMethod", "weight_scale_inv"),
    (COMPRESSED_TENSORS, "CompressedTensorsW8A8Fp8", "weight_scale"),
)
#: Callers of seam one that have no seam two: sglang's diffusion models load layers of their own.
OTHERS = "sglang.multimodal_gen."
KNOWN_ARGUMENTS = {"weight_block_size", "act_scale_ue8m0"}
FLAGS_THAT_WORK = "--fp8-gemm-backend auto or triton"

_lock = threading.Lock()
_said: set[str] = set()
#: Seams that are not as we know them: while there is one, sglang's own dispatch answers.
_unknown: set[str] = set()


def _once(level: int, message: str, *args) -> None:
    """Log a line the first time it comes up in this process."""
    text = message % args if args else message
    if text not in _said:
        _said.add(text)
        logger.log(level, text)


# ---------------------------------------------------------------- installing the two seams


def install(finished=None) -> None:
    """Wrap both seams in every sglang module that is loaded by now. Idempotent.

    `finished` is a module that has just been executed, although its import is under way.

    A seam that is missing or whose signature is not known is left alone, with one ERROR that names
    the host's version and the file: sglang then dispatches as if this package were not there.
    """
    with _lock:
        fp8_utils, fp8 = sys.modules.get(FP8_UTILS), sys.modules.get(FP8)
        if fp8_utils is None and fp8 is not None:
            _unknown_seam(FP8_UTILS, fp8)
        if fp8_utils is None or not _wrap_dispatch(fp8_utils):
            return
        for module_name, class_name, scale_name in METHODS:
            module = sys.modules.get(module_name)
            cls = getattr(module, class_name, None)
            if cls is not None:
                _wrap_load(module, cls, scale_name)
            elif module is not None and (module is finished or not _being_imported(module)):
                _unknown_seam(class_name, module)


def installed() -> bool:
    """True where sglang's dispatch goes through this package in this process."""
    dispatch = getattr(sys.modules.get(FP8_UTILS), DISPATCH, None)
    return getattr(dispatch, "sglang_kt_sm120", False) and not _unknown


def _being_imported(module) -> bool:
    return getattr(getattr(module, "__spec__", None), "_initializing", False)


def _unknown_seam(what: str, module) -> None:
    _unknown.add(what)
    _once(
        logging.ERROR,
        "sglang-kt-sm120 %s: %s in %s of %s is not as in any release it knows; sglang's own FP8 "
        "dispatch stays. Please report this.",
        __version__, what, getattr(module, "__file__", module.__name__), _host_version(),
    )  # fmt: skip


def _host_version() -> str:
    """Return the installed sglang's name and version (the fork's `__version__` is 0.0.0.dev0)."""
    from importlib import metadata

    for name in ("sglang-kt", "sglang"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "an sglang that is not installed"


def _wrap_dispatch(fp8_utils) -> bool:
    original = getattr(fp8_utils, DISPATCH, None)
    if getattr(original, "sglang_kt_sm120", False):
        _rebind(original.__wrapped__, original)
        return True
    if not callable(original) or not set(inspect.signature(original).parameters) <= KNOWN_ARGUMENTS:
        _unknown_seam(DISPATCH, fp8_utils)
        return False

    @functools.wraps(original)
    def dispatch(*args, **kwargs):
        if sys._getframe(1).f_globals.get("__name__", "").startswith(OTHERS):
            return original(*args, **kwargs)
        return _dispatch(original, fp8_utils, args, kwargs)

    dispatch.sglang_kt_sm120 = True
    setattr(fp8_utils, DISPATCH, dispatch)
    _rebind(original, dispatch)
    return True


def _rebind(original: Callable, dispatch: Callable) -> None:
    """Replace the copies that `from fp8_utils import dispatch_...` left in sglang's modules."""
    for name, module in tuple(sys.modules.items()):
        # Not getattr: a module's own __getattr__ may import half of sglang, or raise.
        if name.startswith("sglang.") and vars(module).get(DISPATCH) is original:
            setattr(module, DISPATCH, dispatch)


def _wrap_load(module, cls, scale_name: str) -> None:
    original = cls.__dict__.get("process_weights_after_loading")
    if getattr(original, "sglang_kt_sm120", False):
        return
    if not callable(original) or len(inspect.signature(original).parameters) != 2:
        _unknown_seam(f"{cls.__name__}.process_weights_after_loading", module)
        return

    @functools.wraps(original)
    def process_weights_after_loading(self, layer):
        ours = _keep(self, layer)
        result = original(self, layer)
        if ours is not None:
            _prepare(self, ours, layer, scale_name)
        return result

    process_weights_after_loading.sglang_kt_sm120 = True
    cls.process_weights_after_loading = process_weights_after_loading


# ---------------------------------------------------------------- seam one: dispatch


def _dispatch(original: Callable, fp8_utils, args: tuple, kwargs: dict):
    try:
        stock = original(*args, **kwargs)
    except Exception:  # whatever the host refuses with; raised again
        _name_flags_that_work(fp8_utils)
        raise
    try:
        block = kwargs.get("weight_block_size", args[0] if args else None)
        return _answer(stock, fp8_utils, block)
    except Refused as refusal:
        raise RuntimeError(str(refusal)) from None
    except Exception as error:  # ours must not take a server down: stock it is
        _failed("dispatch", error)
        return stock


class Refused(RuntimeError):
    """`SGLANG_KT_SM120_STRICT=1` refuses a request that SM12x cannot serve."""


def _failed(where: str, error: Exception) -> None:
    if f"failed {where}" not in _said:
        _said.add(f"failed {where}")
        trace = "".join(traceback.format_exception(error))
        logger.error("sglang-kt-sm120 failed in %s; sglang goes its own way\n%s", where, trace)


def _name_flags_that_work(fp8_utils) -> None:
    """Under a refusal of the host's own, say what does work here; the refusal itself stands."""
    try:
        from sglang_kt_sm120 import devices

        names = devices.sm120_names()
        if names:
            asked = request.requested(fp8_utils)
            _once(
                logging.ERROR,
                "sglang refuses %s on %s; what works here: %s.",
                asked.source or "this FP8 backend", names[0], FLAGS_THAT_WORK,
            )  # fmt: skip
    except Exception as error:  # a hint must not hide the refusal
        _failed("explaining a refusal", error)


def _answer(stock: Callable, fp8_utils, block):
    """Return our linear where the request is ours to serve on a visible SM12x GPU, else `stock`."""
    from sglang_kt_sm120 import devices

    names = devices.sm120_names()
    if _unknown or not names or (block is not None and list(block) != [128, 128]):
        return stock
    asked = request.requested(fp8_utils)
    if asked.backend not in env.REPLACE.get():
        _once(
            logging.INFO,
            "sglang-kt-sm120 %s steps aside on %s: %s asks for sglang's own %s.",
            __version__, names[0], asked.source or "the default", _name(stock),
        )  # fmt: skip
        return stock
    if asked.backend == "flashinfer_trtllm":
        if env.STRICT.get():
            raise Refused(
                f"{asked.source} was asked for, but FlashInfer's trtllm has no kernel for "
                f"{names[0]}; use {FLAGS_THAT_WORK}, or unset {env.STRICT.name} to be served "
                "by sglang-kt-sm120"
            )
        _once(
            logging.WARNING,
            "%s was asked for, but FlashInfer's trtllm has no kernel for %s; "
            "sglang-kt-sm120 serves instead. %s ask for that without this warning.",
            asked.source, names[0], FLAGS_THAT_WORK,
        )  # fmt: skip

    from sglang_kt_sm120 import linear, op
    from sglang_kt_sm120.backends import cutlass

    if request.server_argument(fp8_utils, "enable_deterministic_inference"):
        op.set_deterministic(True)
    by_default = asked.backend == "auto" and stock is getattr(
        fp8_utils, "cutlass_w8a8_block_fp8_linear_with_fallback", None
    )
    cutlass.offer(getattr(fp8_utils, "fp8_blockwise_scaled_mm", None), is_default=by_default)
    _once(
        logging.INFO,
        "sglang-kt-sm120 %s is active on %s: block-FP8 linears go to %s instead of %s "
        "(off: %s=0).",
        __version__, ", ".join(sorted(set(names))), "sglang_kt_sm120::block_fp8_linear",
        _name(stock), env.ENABLE.name,
    )  # fmt: skip
    return linear.Sm120BlockFp8Linear(stock)


def _name(function) -> str:
    function = getattr(function, "func", function)
    return getattr(function, "__name__", repr(function))


# ---------------------------------------------------------------- seam two: load


def _keep(method, layer):
    """Return the method's `Sm120BlockFp8Linear`, or None after giving sglang's function back."""
    ours = getattr(method, "w8a8_block_fp8_linear", None)
    if type(ours).__name__ != "Sm120BlockFp8Linear":
        return None
    try:
        why_not = _not_ours(method, layer)
    except Exception as error:  # ours must not take a server down: stock it is
        _failed("looking at a layer", error)
        why_not = "failed"
    if why_not is None:
        return ours
    logger.debug("a layer stays with sglang: %s", why_not)
    method.w8a8_block_fp8_linear = ours.stock
    return None


def _not_ours(method, layer) -> str | None:
    """Return why this layer is not ours, or None: its block size, its format, its own device."""
    from sglang_kt_sm120 import devices

    config = getattr(method, "quant_config", None)
    block = getattr(method, "weight_block_size", None) or getattr(config, "weight_block_size", None)
    if block is None or list(block) != [128, 128]:
        return f"weight blocks are {block}"
    if getattr(method, "use_mxfp8", False) or getattr(method, "use_marlin", False):
        return "MXFP8 or Marlin layer"
    device = layer.weight.device
    index = None
    if device.type == "cuda":
        import torch

        index = torch.cuda.current_device() if device.index is None else device.index
    if not devices.is_sm120(devices.capability(index)):
        return f"its device is {device}"
    return None


def _prepare(method, ours, layer, scale_name: str) -> None:
    """Check the loaded layer, then probe and warm what it will run.

    Raises for a layer that no kernel could serve, or that a forced backend cannot.
    """
    from sglang_kt_sm120 import select

    weight, scale = layer.weight, getattr(layer, scale_name)
    ours.prepare(weight, scale)
    try:
        import torch

        from sglang_kt_sm120 import warm

        # A buffer, because a host that releases and restores its memory (sleep mode, for RL) keeps
        # the contents of a model's buffers, and of nothing else.
        if ours.counters is not None and isinstance(layer, torch.nn.Module):
            layer.register_buffer("sm120_counters", ours.counters, persistent=False)
        dtype = getattr(layer, "orig_dtype", torch.bfloat16)
        _prove_cutlass(weight, dtype)
        with torch.inference_mode():
            warm.layer(ours, weight, scale, dtype)
    except select.NoBackend:
        raise
    except Exception as error:  # no compiler, no memory, anything: sglang's own it is
        _failed("warming a layer", error)
        method.w8a8_block_fp8_linear = request.what_serves(sys.modules.get(FP8_UTILS), ours.stock)


def _prove_cutlass(weight, dtype) -> None:
    """Probe those of the host's CUTLASS kernels on this layer's shape that a choice could take.

    What the ranks say to each other comes first: a table may ask for a kernel.
    """
    import torch

    from sglang_kt_sm120 import op, ranks
    from sglang_kt_sm120.backends import cutlass
    from sglang_kt_sm120.backends.cutlass import agreement

    if weight.is_cuda and not torch.cuda.is_current_stream_capturing():
        cutlass.join(*agreement.ranks_of_host())
        ranks.agree_on_tables(weight.device)
        op.prove_cutlass(weight.device, *weight.shape, dtype)


# ---------------------------------------------------------------- by name


def linear_functions() -> dict[str, tuple[Callable, str]]:
    """Return the host's own linear functions, as baselines: name -> (function, activation scales).

    Empty where sglang does not import. "ue8m0" scales are rounded to powers of two.
    """
    try:
        from sglang.srt.layers.quantization import fp8_utils
    except ImportError:
        return {}
    wrapper = getattr(fp8_utils, "deep_gemm_wrapper", None)
    rounded = "ue8m0" if getattr(wrapper, "DEEPGEMM_SCALE_UE8M0", False) else "fp32"
    names = {
        "stock": ("triton_w8a8_block_fp8_linear", "fp32"),
        "cutlass": ("cutlass_w8a8_block_fp8_linear_with_fallback", "fp32"),
        "deepgemm": ("deepgemm_w8a8_block_fp8_linear_with_fallback", rounded),
    }
    return {
        name: (getattr(fp8_utils, function), scales)
        for name, (function, scales) in names.items()
        if hasattr(fp8_utils, function)
        and (name != "deepgemm" or getattr(wrapper, "ENABLE_JIT_DEEPGEMM", False))
    }


def offer_cutlass() -> None:
    """Take the host's own CUTLASS kernel as a server does, for a tool that builds no layer.

    Does nothing where sglang does not import. The releases that bring a JIT kernel of their own are
    those whose `auto` on SM12x is CUTLASS.
    """
    try:
        from sglang.srt.layers.quantization import fp8_utils
    except ImportError:
        return
    from sglang_kt_sm120.backends import cutlass

    product = getattr(fp8_utils, "fp8_blockwise_scaled_mm", None)
    module = getattr(product, "__module__", None) or ""
    cutlass.offer(product, is_default=module.startswith("sglang."))
