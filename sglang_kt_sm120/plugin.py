"""The two ways in: sglang's plugin loader (upstream >= 0.5.11) and the start-up hook.

Both end in `host.install()`, which is idempotent. Nothing here raises: a plugin that fails leaves
sglang as it is and says so.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from sglang_kt_sm120 import env

logger = logging.getLogger("sglang_kt_sm120")
ENTRY_POINT = "kt_sm120"


def register() -> None:
    """Entry point `kt_sm120` of group `sglang.srt.plugins`: called once by sglang's loader."""
    try:
        if not env.ENABLE.get():
            return
        from sglang_kt_sm120 import _startup, host

        _startup.arm()  # fp8.py and fp8_utils.py may not be imported yet
        host.install()
    except Exception:  # sglang starts whatever is wrong with us
        logger.exception("sglang-kt-sm120 could not be installed: sglang's own FP8 dispatch stays")


def after_import(module) -> None:
    """Called by the start-up hook when one of sglang's block-FP8 modules has just been imported."""
    try:
        if not env.ENABLE.get() or stands_down(module.__file__, os.environ.get("SGLANG_PLUGINS")):
            return
        from sglang_kt_sm120 import host

        host.install(finished=module)
    except Exception:  # as above
        logger.exception("sglang-kt-sm120 could not be installed: sglang's own FP8 dispatch stays")


def allowed_by(text: str | None) -> bool:
    """True where `SGLANG_PLUGINS` with this text lets this plugin load: unset, or it names us."""
    names = {name.strip() for name in (text or "").split(",") if name.strip()}
    return not names or ENTRY_POINT in names


def stands_down(module_file: str | None, allowed: str | None) -> bool:
    """True where sglang has a plugin loader and its allow-list, `SGLANG_PLUGINS`, leaves us out.

    `module_file` is the file of a module under `sglang/srt/layers/quantization`; `allowed` the
    variable's text. Hosts without a loader do not know the variable, so it decides nothing there.
    """
    if allowed_by(allowed) or not module_file:
        return False
    root = next((p for p in Path(module_file).parents if p.name == "srt"), None)
    return root is not None and (root / "plugins" / "__init__.py").is_file()
