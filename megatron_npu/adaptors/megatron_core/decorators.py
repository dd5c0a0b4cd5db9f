"""Provide the decorators of ``patching``, bound to this upstream, and the conditions under which patches
are skipped.
"""

from __future__ import annotations

from functools import partial

from megatron_npu import standins
from megatron_npu.adaptors.shared import decorators
from megatron_npu.patching.patch import NotAsked

WITHOUT_CUDA, installed = decorators.WITHOUT_CUDA, decorators.installed
NOT_FIXED = "not fixed up to 0.19.2, and no issue has been filed upstream"  # ``until`` of a bug

records = decorators.recorder("megatron_core")
replace, around, wrap = records.replace, records.around, records.wrap
constant, watch = records.constant, records.watch
backport = partial(around, upstream_bug=True, condition=decorators.backports_not_wanted)
own_backport = partial(around, upstream_bug=True, condition=decorators.own_backports_not_wanted)


def transformer_engine_present() -> str | None:
    """Return the reason why TransformerEngine's kernels need no replacement, or None if they need one."""
    return None if standins.te_layers() else installed("transformer_engine")


def te_layers_present() -> str | None:
    """Return the reason why TransformerEngine's layers need no replacement, or None if they need one.

    TransformerEngine is installed, or our layers are registered under its names.
    """
    ours = "MEGATRON_NPU_TE=local: layers of megatron_npu under TransformerEngine's names"
    return ours if standins.te_layers() else installed("transformer_engine")


def te_layers_not_ours() -> str | None:
    """Return the reason why layers under TransformerEngine's names need no patch, or None if they need
    one.
    """
    if standins.te_layers():
        return None
    return installed("transformer_engine") or NotAsked("MEGATRON_NPU_TE is not local")


def fused_optimizer_present() -> str | None:
    """Return the reason why fused optimizers need no replacement, or None if they need one."""
    return transformer_engine_present() or installed("apex")
