"""The ``torch.backends`` entry point: torch calls ``arm`` at the end of ``import torch``.

It lies outside the package, because importing the package arms the hook.
"""

from __future__ import annotations

import logging
import os


def arm() -> None:
    """Arm the import hook unless ``MEGATRON_NPU_AUTOLOAD=0``.

    Never raises: an exception here would make ``import torch`` itself fail and hide the cause.
    """
    if os.environ.get("MEGATRON_NPU_AUTOLOAD", "").strip() == "0":
        return
    try:
        import megatron_npu  # noqa: F401 (arms; its parts may be imported already without it: sim/activate.py)
        from megatron_npu.base import settings

        settings.AUTOLOAD.get()  # a value that is neither 0 nor 1 is said, not taken for either
    except Exception:
        logging.getLogger(__name__).exception("megatron_npu could not arm its import hook")
