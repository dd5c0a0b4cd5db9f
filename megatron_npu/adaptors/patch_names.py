"""Look up patches by upstream symbol, by file in this project, or by the name used in a guide.

Appendix A of the guide to Megatron-LM 285068c8 lists functions, each with the adaptor file that changes it.
Our files group the functions differently, so the guide's names are kept here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from megatron_npu.base.errors import UsageError
from megatron_npu.patching.patch import Patch

_CROSS_ENTROPY = "megatron.core.tensor_parallel.cross_entropy:_VocabParallelCrossEntropy"
_TRANSFORMER = "megatron.model.transformer"
_NORM = "megatron.model.fused_layer_norm:MixedFusedLayerNorm"
_SOFTMAX = "megatron.model.fused_softmax:FusedScaleMaskSoftmax"
_DISTRIBUTED = "megatron.optimizer.distrib_optimizer:DistributedOptimizer"
_OPTIMIZER = "megatron.optimizer.optimizer"

GUIDE: dict[str, tuple[str, ...]] = {
    "adaptor_arguments": ("megatron.arguments:_add_training_args",),
    "adaptor_core_cross_entropy": (f"{_CROSS_ENTROPY}.forward", f"{_CROSS_ENTROPY}.backward"),
    "adaptor_core_layers": ("megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",),
    "adaptor_core_tensor_parallel": ("megatron.core.tensor_parallel.random:_set_cuda_rng_state",),
    "adaptor_core_utils": ("megatron.core.utils:_kernel_make_viewless_tensor",),
    "adaptor_data_gpt_dataset": ("megatron.data.gpt_dataset:_build_index_mappings",),
    "adaptor_initialize": ("megatron.initialize:set_jit_fusion_options",),
    "adaptor_model_fused_layer_norm": (f"{_NORM}.__init__", f"{_NORM}.forward"),
    "adaptor_model_fused_softmax": (
        f"{_SOFTMAX}.is_kernel_available",
        f"{_SOFTMAX}.forward_fused_softmax",
    ),
    "adaptor_model_module": (
        "megatron.model.module:fp32_to_float16",
        "megatron.model.module:float16_to_fp32",
    ),
    "adaptor_model_transformer": (
        f"{_TRANSFORMER}:ParallelMLP.__init__",
        f"{_TRANSFORMER}:ParallelMLP.forward",
        f"{_TRANSFORMER}:CoreAttention.forward",
        f"{_TRANSFORMER}:FlashSelfAttention",
        f"{_TRANSFORMER}:ParallelAttention.__init__",
        f"{_TRANSFORMER}:ParallelAttention.forward",
    ),
    "adaptor_optimizer_clip_grads": ("megatron.optimizer.clip_grads:clip_grad_norm_fp32",),
    "adaptor_optimizer_distrib_optimizer": (
        f"{_DISTRIBUTED}.__init__",
        f"{_DISTRIBUTED}.build_model_and_main_param_groups",
    ),
    "adaptor_optimizer_optimizer": (
        f"{_OPTIMIZER}:MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan",
        "megatron.optimizer:Adam",
        f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params.__init__",
    ),
    "adaptor_p2p_communication": ("megatron.p2p_communication:_communicate",),
    "adaptor_schedules": (
        "megatron.schedules:backward_step",
        "megatron.schedules:forward_backward_no_pipelining",
        "megatron.schedules:deallocate_output_tensor",
    ),
}
_WATCHED = "watch"  # the kind of a patch that changes nothing
_SOME = 5  # close names that an error lists


def of_the_guide(patches: Iterable[Patch], name: str = "") -> str:
    """Return a line that counts how many functions of the guide are replaced and how many are only watched.

    Args:
        patches: patches from the ledger.
        name: the name of the device; patches for other devices are not counted.

    Returns:
        An empty string if the patches do not cover all of the guide's functions.
    """
    kinds: dict[str, set[str]] = {target: set() for targets in GUIDE.values() for target in targets}
    for patch in patches:
        if patch.target in kinds:
            kinds[patch.target].add(patch.kind if not name or name in patch.devices else _WATCHED)
    if not all(kinds.values()):
        return ""
    replaced = sum(found != {_WATCHED} for found in kinds.values())
    on = f" on {name}" if name else ""
    return (
        f"{replaced} of the guide's {len(kinds)} functions are replaced or wrapped{on}, and "
        f"{len(kinds) - replaced} are watched: upstream's own code runs, and their pins are compared"
    )


def called(names: Sequence[str], patches: Iterable[Patch]) -> list[Patch]:
    """Return the patches that match any of the given names, or all patches if no name is given.

    A name is one of the following: a file of the guide, with or without ``.py``; a part of a target, with
    dots or a colon, where the guide's ``_init_`` may stand for ``__init__``; or a part of the path of one of
    our files.

    Raises:
        UsageError: a name matches no patch.
    """
    patches = list(patches)
    found = [_named(name, patches) for name in names]
    for name, some in zip(names, found, strict=True):
        if not some:
            raise UsageError(f"there is no patch named {name}; {_advice(name, patches)}. {_remedy(name)}")
    wanted = {patch.key for some in found for patch in some}
    return [patch for patch in patches if not names or patch.key in wanted]


def _named(name: str, patches: list[Patch]) -> list[Patch]:
    listed = GUIDE.get(name.removesuffix(".py"))
    if listed is not None:
        return [patch for patch in patches if patch.target in listed]
    part = name.replace(":", ".").replace("._init_", ".__init__")
    whole = [patch for patch in patches if _dotted(patch) == part]
    if whole:
        return whole
    # the guide leaves out a package here and there: megatron.clip_grad_norm_fp32
    for shortened in (part, part.removeprefix("megatron.")):
        some = [patch for patch in patches if shortened in _dotted(patch) or name in patch.ours]
        if some:
            return some
    return []


def _dotted(patch: Patch) -> str:
    return patch.target.replace(":", ".")


def _remedy(name: str) -> str:
    if name.removesuffix(".py") in GUIDE:
        return (
            "It is a file from the guide to Megatron-LM 285068c8, and this Megatron has none of its "
            "functions."
        )
    return "To list all patches, run: megatron-npu patches list --static"


def _advice(name: str, patches: list[Patch]) -> str:
    """Return what an error message says about a name that no patch has.

    The name may be correct: this Megatron may have a function that is not patched.
    """
    if name.removesuffix(".py") in GUIDE:
        return "use one of the patches of this Megatron"
    if close := _close(name, patches):
        return f"if this Megatron defines it, upstream's own code runs; similar names are {close}"
    return "use part of a target's name, such as core_attention or VocabParallelEmbedding.forward"


def _close(name: str, patches: list[Patch]) -> str:
    """Return names that are similar to ``name``, or an empty string.

    Whole names and their last parts are compared.
    """
    known: dict[str, str] = {guide: guide for guide in GUIDE}
    for patch in patches:
        known |= {patch.qualname: patch.target, _dotted(patch): patch.target}
        known[patch.qualname.rpartition(".")[2]] = patch.target
        file = patch.ours.rpartition(":")[0].rpartition("/")[2]
        known[file] = file
    close = difflib.get_close_matches(name, known, n=2 * _SOME, cutoff=0.5)
    return " or ".join(list(dict.fromkeys(known[each] for each in close))[:_SOME])
