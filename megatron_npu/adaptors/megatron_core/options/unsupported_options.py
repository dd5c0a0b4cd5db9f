"""Reject or disable options of megatron-core that require TransformerEngine or CUDA if these are not
available.

The options are fields of ``TransformerConfig`` and, mostly under the same names, arguments of the scripts.
Options that would change the results, or that are meant to hide communication, are rejected with a one-line
error. Options that only make launches faster are disabled, and this is logged.

Patches ``transformer.transformer_config``, ``models.mamba.mamba_model``, ``models.hybrid.hybrid_block`` and
``ssm.mamba_mixer`` of ``megatron.core``; ``arguments`` does the same for the scripts' arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn
from unittest.mock import NonCallableMock

from megatron_npu import devices, standins
from megatron_npu.adaptors.megatron_core.decorators import (
    WITHOUT_CUDA,
    around,
    installed,
    te_layers_present,
    transformer_engine_present,
)
from megatron_npu.adaptors.megatron_core.te import redirect
from megatron_npu.base.errors import UsageError
from megatron_npu.ops import dispatch


class Option(NamedTuple):
    """An option of megatron-core: its flag, the name of its field, and the values that request it.

    ``remedy`` is used for an option that is rejected; ``off`` is the value that disables any other option.
    """

    flag: str
    fields: tuple[str, ...]
    asks: Callable[[Any], bool] = bool
    remedy: str = ""
    off: Any = False


NEED_TRANSFORMER_ENGINE = (
    Option("--fp8-format", ("fp8",), remedy="Remove it and train in bf16, or install TransformerEngine."),
    Option("--fp4-format", ("fp4",), remedy="Remove it and train in bf16, or install TransformerEngine."),
    Option(
        "--te-precision-config-file",
        ("te_precision_config_file",),
        remedy="Remove it, because the local layers compute in the precision of their parameters.",
    ),
    Option(
        "--tp-comm-overlap",
        ("tp_comm_overlap",),
        asks=lambda value: bool(value) and devices.current().name != "npu",  # see tensor_parallel_overlap
        remedy="Remove it, because its buffers are TransformerEngine's; --sequence-parallel works without "
        "it.",
    ),
    Option(  # since 0.18
        "--moe-paged-stash",
        ("moe_paged_stash",),
        remedy="Remove it, because it moves the memory of TransformerEngine's experts with Triton kernels.",
    ),
    Option(  # since 0.18
        "--moe-expert-rank-capacity-factor",
        ("moe_expert_rank_capacity_factor",),
        asks=lambda value: value is not None,
        remedy="Remove it, because it is for experts whose memory is stashed in pages by Triton kernels.",
    ),
    Option(  # since 0.19
        "--tensor-parallel-num-weight-shards",
        ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"),
        asks=lambda value: value not in (None, 1),
        remedy="Remove it, because TransformerEngine's layers gather its weights.",
    ),
    Option(
        "--cross-entropy-fusion-impl",
        ("cross_entropy_fusion_impl",),
        asks=lambda value: value == "te",
        remedy="Use --cross-entropy-fusion-impl native, which is fused here.",
    ),
)
DO_WITHOUT_TRANSFORMER_ENGINE = (
    Option("--te-rng-tracker", ("te_rng_tracker", "use_te_rng_tracker")),
    Option("--use-te-activation-func", ("use_te_activation_func",)),
    Option(  # since 0.17; our layers under TransformerEngine's names have it
        "--fused-residual-rmsnorm",
        ("fused_residual_rmsnorm",),
        asks=lambda value: bool(value) and not standins.te_layers(),
    ),
)
NEED_CUDA = (
    Option("--use-nccl-ub", ("nccl_ub",), remedy="Remove it, because it registers buffers with NCCL."),
    Option(
        "--use-sharp",
        ("use_sharp",),
        remedy="Remove it, because it lets InfiniBand switches reduce for NCCL.",
    ),
)
CUDA_GRAPHS = (
    Option("--enable-cuda-graph", ("enable_cuda_graph",)),
    Option("--external-cuda-graph", ("external_cuda_graph",)),
    Option(
        "--cuda-graph-impl", ("cuda_graph_impl",), asks=lambda value: value not in (None, "none"), off="none"
    ),
    Option(  # since 0.18, which refuses a scope of graphs that are not captured; None is what fits
        "--inference-cuda-graph-scope",
        ("inference_cuda_graph_scope",),
        asks=lambda value: getattr(value, "name", value) not in (None, "none"),
        off=None,
    ),
)


def refuse(options: Any, wanting: tuple[Option, ...], absent: str = "TransformerEngine") -> None:
    """Check that no option requests a feature of an unavailable package.

    Raises:
        UsageError: an option requires it.
    """
    for option in wanting:
        for field in option.fields:
            value = getattr(options, field, None)
            if option.asks(value):
                given = option.flag if value is True else f"{option.flag} {value}"
                raise UsageError(f"{given} is not supported without {absent}. {option.remedy}")


def switch_off(options: Any, harmless: tuple[Option, ...], reason: str) -> None:
    """Disable the options that have no effect without CUDA or TransformerEngine, and log them.

    Raises:
        FallbackForbiddenError: an option would be disabled in strict mode.
    """
    for option in harmless:
        for field in option.fields:
            if option.asks(getattr(options, field, None)):
                remedy = f"Remove {option.flag}"
                dispatch.report_fallback(option.flag.removeprefix("--"), reason, "is ignored", remedy)
                setattr(options, field, option.off)


def do_without_transformer_engine(options: Any) -> None:
    """Reject options whose results would differ without TransformerEngine, and disable all others that
    require it.

    Args:
        options: a ``TransformerConfig``, or the scripts' arguments.

    Raises:
        UsageError: an option is rejected.
        FallbackForbiddenError: an option would be disabled in strict mode.
    """
    refuse(options, NEED_TRANSFORMER_ENGINE)
    switch_off(options, DO_WITHOUT_TRANSFORMER_ENGINE, "TransformerEngine is not installed")


def do_without_cuda_graphs(options: Any) -> None:
    """Disable CUDA graphs, so that each kernel is launched individually.

    Args:
        options: a ``TransformerConfig``, or the scripts' arguments.

    Raises:
        FallbackForbiddenError: CUDA graphs are requested in strict mode.
    """
    switch_off(options, CUDA_GRAPHS, f"there are no CUDA graphs on the {devices.current().name} device")


def take_local_implementation(args: argparse.Namespace) -> None:
    """Select the local layers, which use this project's operations.

    Options that they do not support are rejected or disabled.

    With ``MEGATRON_NPU_TE=local`` and ``--transformer-impl transformer_engine``, the layers are ours too, but
    under TransformerEngine's names.

    Args:
        args: the scripts' arguments.

    Raises:
        UsageError: an option is rejected.
        FallbackForbiddenError: the local layers were not requested, and strict mode is enabled.
    """
    do_without_transformer_engine(args)
    named = standins.te_layers() and args.transformer_impl == "transformer_engine"
    if args.transformer_impl != "local" and not named:  # the default, or since 0.16 inference_optimized
        redirect.report(f"--transformer-impl {args.transformer_impl}")
        args.transformer_impl = "local"
    variant = getattr(args, "experimental_attention_variant", None)
    if variant and not named:  # since 0.16; upstream specifies such layers under those names alone
        raise UsageError(
            f"--experimental-attention-variant {variant} requires TransformerEngine, which is not "
            "installed. Set MEGATRON_NPU_TE=local, which provides layers under its names."
        )
    # On by default, and refused then without TransformerEngine; the path without it is as fused here.
    if args.rotary_interleaved or args.multi_latent_attention:
        args.apply_rope_fusion = False


@around(
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    condition=transformer_engine_present,
    why="without TransformerEngine fp8 silently becomes another precision; overlapped communication, its "
    "cross-entropy and the expert fusions fail with an assertion, a NameError or an ImportError",
    order=2,
)
def configure_without_transformer_engine(original: Callable[[Any], None], self: Any) -> None:
    """Check the options that require TransformerEngine before upstream's configuration code runs."""
    do_without_transformer_engine(self)
    original(self)


@around(
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    devices=WITHOUT_CUDA,
    why="CUDA graphs are captured from CUDA streams: the first step fails an assertion",
    order=2,
)
def configure_without_cuda_graphs(original: Callable[[Any], None], self: Any) -> None:
    """Disable CUDA graphs before upstream's configuration code runs."""
    do_without_cuda_graphs(self)
    original(self)


def _mamba_present() -> str | None:
    """Return the reason why the check for Mamba layers is not needed, or None if it is needed.

    Either mamba_ssm is installed, or our scan replaces it.
    """
    ours = "MEGATRON_NPU_TE=local: megatron_npu's scan under mamba_ssm's name"
    return ours if standins.mamba_kernels() else installed("mamba_ssm")


_without_mamba_ssm = partial(
    around,
    condition=_mamba_present,
    why=(
        "the model's layers use mamba_ssm's kernels, which require CUDA: without the package, building "
        "the model fails with an AttributeError on None or an ImportError, depending on the version"
    ),
)


@_without_mamba_ssm("megatron.core.models.mamba.mamba_model:MambaModel.__init__", versions="<0.18")
@_without_mamba_ssm("megatron.core.ssm.mamba_mixer:MambaMixer.__init__", versions=">=0.18")  # of hybrids
def refuse_without_mamba_ssm(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Reject a Mamba model before it is built.

    Since 0.18, it is rejected when its first Mamba layer is built.
    """
    raise UsageError(
        "a Mamba model requires the packages mamba-ssm and causal-conv1d, which are not installed and "
        "require CUDA. Set MEGATRON_NPU_TE=local, which provides the layers in plain torch."
    )


@around(
    "megatron.core.models.hybrid.hybrid_block:HybridStack.__init__",
    versions=">=0.18",
    order=1,
    condition=te_layers_present,
    why="the specs of hybrid models name TransformerEngine's layers, which are mocks without it: building "
    "the model raises unittest's StopIteration",
)
def refuse_mocks_of_layers(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Reject a hybrid model that uses TransformerEngine's attention classes.

    Specs of local layers are accepted.
    """
    submodules = kwargs.get("submodules", args[1] if len(args) > 1 else None)
    if isinstance(_query_projection(submodules), NonCallableMock):
        raise UsageError(
            "a hybrid model uses the layers of TransformerEngine, which is not installed. Set "
            "MEGATRON_NPU_TE=local, which provides these layers."
        )
    original(self, *args, **kwargs)


def _query_projection(submodules: Any) -> Any:
    """Return the class of the query projection in a hybrid model's attention layers, or None if the spec
    names no class.
    """
    for name in ("attention_layer", "self_attention"):
        submodules = getattr(getattr(submodules, name, None), "submodules", None)
    return getattr(submodules, "linear_qkv", None)
