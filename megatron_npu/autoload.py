"""The ``torch.backends`` entry point: torch calls ``arm`` at the end of ``import torch``."""

from __future__ import annotations

import logging


def arm() -> None:
    """Arm the import hook unless ``MEGATRON_NPU_AUTOLOAD=0``.

    Never raises: an exception here would make ``import torch`` itself fail and hide the cause.
    """
    try:
        from megatron_npu import settings

        if settings.AUTOLOAD.enabled():
            from megatron_npu import plugin

            plugin.install()
    except Exception:
        logging.getLogger(__name__).exception("megatron_npu could not arm its import hook")
