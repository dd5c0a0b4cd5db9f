"""The ``torch.backends`` entry point: torch calls ``arm`` at the end of ``import torch``.

It is outside the package, because importing the package arms the hook.
"""

from __future__ import annotations

import logging
import os
import sys


def arm() -> None:
    """Arm the import hook unless ``MEGATRON_NPU_AUTOLOAD=0``; redirect torch if ``MEGATRON_NPU_REDIRECT=1``.

    Raises no exception, because that would make ``import torch`` itself fail and hide the cause. If a
    requested
    redirection is impossible, the process ends with one line and exit code 2.
    """
    if os.environ.get("MEGATRON_NPU_AUTOLOAD", "").strip() == "0":
        return
    # with its devices half imported, it is the package that imports torch: a command, a child that we spawned
    is_ours = "megatron_npu.devices" in sys.modules
    try:
        import megatron_npu  # noqa: F401 (arms; its parts may be imported already without it: sim/activate.py)
        from megatron_npu import plugin
        from megatron_npu.base import errors, settings
    except Exception as error:
        told = logging.getLogger(__name__)
        if type(error).__module__ == "megatron_npu.base.errors":  # a user's mistake, not ours
            told.error("megatron_npu could not arm its import hook: %s", error)
        else:
            told.exception("megatron_npu could not arm its import hook")
        return
    try:
        settings.AUTOLOAD.get()  # a value that is neither 0 nor 1 is said, not taken for either
    except errors.UsageError as error:
        logging.getLogger(__name__).error("megatron_npu: error: %s", error)
    try:
        if settings.REDIRECT.enabled() and not is_ours:
            plugin.redirect_program()
    except errors.UsageError as error:
        print(f"megatron_npu: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except Exception:
        logging.getLogger(__name__).exception("megatron_npu could not redirect torch")
