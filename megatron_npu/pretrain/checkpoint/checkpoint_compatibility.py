"""Check whether a run with the given flags can resume from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.checkpoint.checkpoint_description import CheckpointInfo
from megatron_npu.pretrain.checkpoint.checkpoint_files import is_of_fsdp
from megatron_npu.pretrain.flags import latent_flags, rotary_flags
from megatron_npu.pretrain.flags.checkpoint_parts import LayoutFlags, ResumeFlags

# What decides the shapes of the weights and what is computed with them: (attribute, its flag).
_SAME_MODEL = (
    ("num_layers", "--num-layers"),
    ("hidden_size", "--hidden-size"),
    ("num_attention_heads", "--num-attention-heads"),
    ("num_query_groups", "--num-query-groups"),
    ("kv_channels", "--kv-channels"),
    ("ffn_hidden_size", "--ffn-hidden-size"),
    ("tokenizer_vocab_size", "the vocabulary size"),
    ("position_embedding_type", "--position-embedding-type"),
    ("normalization", "--normalization"),
    ("layernorm_zero_centered_gamma", "--apply-layernorm-1p"),
    ("layernorm_epsilon", "--norm-epsilon"),
    ("rotary_percent", "--rotary-percent"),
    ("rotary_base", "--rotary-base"),
    ("rotary_interleaved", "--rotary-interleaved"),
    ("use_rope_scaling", "--use-rope-scaling"),
    ("rope_scaling_factor", "--rope-scaling-factor"),
    ("rotary_seq_len_interpolation_factor", "--rotary-seq-len-interpolation-factor"),
    ("window_attn_skip_freq", "--window-attn-skip-freq"),
    ("swiglu", "--swiglu"),
    ("add_bias_linear", "--disable-bias-linear"),
    ("add_attention_bias", "--add-attention-bias"),
    ("qk_layernorm", "--qk-layernorm"),
    ("untie_embeddings_and_output_weights", "--untie-embeddings-and-output-weights"),
    ("num_experts", "--num-experts"),
    ("multi_latent_attention", "--multi-latent-attention"),
    ("mtp_num_layers", "--mtp-num-layers"),
)
# Values of checkpoints that are older than the flags.
_BEFORE = {"multi_latent_attention": False, "add_attention_bias": False, **rotary_flags.OF_CORE}
# The same of a model with multi-latent attention.
_SAME_LATENT = tuple((name, f"--{name.replace('_', '-')}") for name in latent_flags.NAMES)
# The same of a model with Llama 3's scaling, or dynamic; and with YaRN.
_SAME_SCALING = tuple((name, f"--{name.replace('_', '-')}") for name in rotary_flags.NAMES)
_SAME_YARN = tuple((name, f"--{name.replace('_', '-')}") for name in rotary_flags.YARN)
# The same of a model with experts.
_SAME_EXPERTS = tuple(
    (name, f"--{name.replace('_', '-')}")
    for name in """
    moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_router_topk moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor
    moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias
    """.split()
)


def require_same_model(found: CheckpointInfo, flags: Mapping[str, Any]) -> None:
    """Check that a checkpoint contains the model that the flags describe.

    Args:
        found: the checkpoint.
        flags: the flags of the loading run by name, with derived values, like the flags in the checkpoint.

    Raises:
        UsageError: flags differ; the error names them.
    """
    saved = _BEFORE | found.arguments
    differing = [
        f"{flag} {_shown(flags[name])} (checkpoint: {_shown(saved.get(name))})"
        for name, flag in _compared(flags)
        if saved.get(name) != flags[name]
    ]
    if differing:
        raise UsageError(
            f"--load {found.path} contains a different model: {', '.join(differing)}",
            remedy="Pass the flags that it was trained with, or load another checkpoint.",
        )


def _compared(flags: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the names of the values that describe a model of this kind, each with its flag."""
    names = list(_SAME_MODEL)
    if flags["num_experts"] is not None:
        names += _SAME_EXPERTS
    if flags["multi_latent_attention"]:
        names += _SAME_LATENT
    if flags["use_rope_scaling"]:
        names += _SAME_SCALING
    if flags["position_embedding_type"] == "yarn":
        names += _SAME_YARN
    if flags["position_embedding_type"] == "learned_absolute":
        names.append(("max_position_embeddings", "--max-position-embeddings"))
    if not flags["add_bias_linear"]:
        names.append(("add_qkv_bias", "--add-qkv-bias"))  # stock scripts turn it on with all other biases
    if flags["add_bias_linear"] and not flags["swiglu"]:
        names.append(("bias_gelu_fusion", "--no-bias-gelu-fusion"))  # which computes another form of GELU
    return names


def _shown(value: object) -> object:
    if isinstance(value, bool):
        return "on" if value else "off"
    return value


def same_model_parallel_sizes(found: CheckpointInfo, flags: LayoutFlags) -> bool:
    """Return True if a run has the same model-parallel sizes as a checkpoint."""
    return all(found.arguments.get(name) == size for name, size in flags.sizes().items())


def require_readable_shards(found: CheckpointInfo, flags: ResumeFlags) -> None:
    """Check that the checkpoint and the run agree on the use of Megatron's FSDP.

    Args:
        found: the checkpoint.
        flags: the flags of the loading run.

    Raises:
        UsageError: only one of the checkpoint and the run uses Megatron's FSDP, or both use it with a
            different precision or vocabulary padding.
    """
    of_fsdp, into_fsdp = is_of_fsdp(found.path), flags.fully_sharded == "megatron"
    if into_fsdp and not of_fsdp:
        raise UsageError(
            f"--load {found.path} cannot be loaded with --{flags.sharding}-memory-optimization, because "
            "Megatron's FSDP reads only checkpoints from a run with zero-2 or zero-3",
            remedy="Use --fsdp-memory-optimization, which can resume from any other checkpoint.",
        )
    if of_fsdp and not into_fsdp and flags.load_optim:
        raise UsageError(
            f"--load {found.path} contains an optimizer state that was sharded by Megatron's FSDP, which "
            "requires --zero-2-memory-optimization or --zero-3-memory-optimization on two data-parallel "
            "ranks",
            remedy="Add it, or pass --no-load-optim or --finetune to load only the weights.",
        )
    if into_fsdp:
        _require_same_precision(found, flags)
    if of_fsdp and found.arguments.get("padded_vocab_size") != flags.padded_vocab_size:
        raise UsageError(
            f"--load {found.path} has a vocabulary of {found.arguments.get('padded_vocab_size')} tokens "
            f"including padding, but this run has {flags.padded_vocab_size}; both must be the same",
            remedy="Pass the --make-vocab-size-divisible-by of the original run.",
        )


def _require_same_precision(found: CheckpointInfo, flags: ResumeFlags) -> None:
    saved, own = (
        "16 bits" if values.get("bf16") or values.get("fp16") else "fp32"
        for values in (found.arguments, vars(flags))
    )
    if saved != own:
        raise UsageError(
            f"--load {found.path} was trained in {saved}, but this run uses {own}; both must be "
            "the same, because each precision wraps the model differently and thus changes the "
            "parameter names",
            remedy="Change --mixed-precision, or train with --fsdp-memory-optimization from the start.",
        )


def _precision(flags: Mapping[str, Any]) -> str:
    return next((name for name in ("bf16", "fp16") if flags.get(name)), "fp32")


def _require_same_main_weights(found: CheckpointInfo, flags: ResumeFlags) -> None:
    before, now = _precision(found.arguments), _precision(vars(flags))
    if before != now:
        raise UsageError(
            f"--load {found.path} was saved in {before}, but this run uses {now}; both must be "
            "the same, because the optimizer keeps fp32 main weights only for 16-bit weights",
            remedy="Change --bf16 or --fp16, or pass --no-load-optim.",
        )


def require_loadable_optimizer(found: CheckpointInfo, flags: ResumeFlags) -> None:
    """Check that a checkpoint's optimizer state can be loaded into the run's layout.

    Args:
        found: a checkpoint with optimizer state.
        flags: the flags of the loading run.

    Raises:
        UsageError: the state belongs to a different optimizer, or is sharded for other parallel sizes.
    """
    saved = found.arguments.get("optimizer", "adam")
    if saved != flags.optimizer:
        raise UsageError(
            f"--load {found.path} was saved with --optimizer {saved}, but this run has {flags.optimizer}; "
            "both must be the same",
            remedy="Change --optimizer, or pass --no-load-optim.",
        )
    kinds = {True: "the distributed optimizer", False: "the plain optimizer"}
    distributed = bool(found.arguments.get("use_distributed_optimizer"))
    if distributed != flags.use_distributed_optimizer:
        raise UsageError(
            f"--load {found.path} was saved with {kinds[distributed]}, but this run has "
            f"{kinds[flags.use_distributed_optimizer]}; both must be the same",
            remedy="Change --use-distributed-optimizer, or pass --no-load-optim.",
        )
    if not distributed:  # which has fp32 weights of its own in each precision
        _require_same_main_weights(found, flags)
    apart = int(found.arguments.get("expert_model_parallel_size", 1)) > 1
    if apart != (flags.expert_model_parallel_size > 1):
        words = {True: "with", False: "without"}
        raise UsageError(
            f"--load {found.path} was saved {words[apart]} --expert-model-parallel-size, but this run was "
            f"started {words[not apart]} this flag; both must use the flag (with any size) or neither, "
            "because the optimizer state of experts is stored differently",
            remedy="Change the flag, or pass --no-load-optim.",
        )
    same = same_model_parallel_sizes(found, flags)
    if distributed and not same and found.optimizer_sharding == "dp_reshardable":
        sizes = (f"{name.replace('_', ' ')} {found.arguments.get(name)}" for name in flags.sizes())
        raise UsageError(
            f"--load {found.path} has a distributed optimizer whose state can be loaded only with the same "
            f"model-parallel sizes: {' and '.join(sizes)}",
            remedy="Pass --no-load-optim, or save the checkpoint with --dist-ckpt-optim-fully-reshardable.",
        )
