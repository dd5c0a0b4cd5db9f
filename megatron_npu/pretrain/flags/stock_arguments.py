"""Convert between the arguments in Megatron-LM's checkpoints and the trainer's flags.

The trainer's flags have Megatron-LM's names, so nothing is translated; only the names that describe the
model, its weights and its tokenizer are selected. Flags for training and layout are dropped.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_npu import devices
from megatron_npu.base.errors import UsageError, either
from megatron_npu.checkpoint_files import hybrid_layers
from megatron_npu.options.attention_flags import AttentionFlags
from megatron_npu.pretrain.flags import arguments, derive, latent_flags, rotary_flags

_MODEL = """
    num_layers hidden_size num_attention_heads group_query_attention num_query_groups kv_channels
    ffn_hidden_size seq_length max_position_embeddings position_embedding_type rotary_percent rotary_base
    rotary_interleaved use_rope_scaling rope_scaling_factor normalization layernorm_epsilon
    window_attn_skip_freq
    layernorm_zero_centered_gamma swiglu add_bias_linear add_qkv_bias qk_layernorm
    untie_embeddings_and_output_weights bias_gelu_fusion bias_swiglu_fusion attention_dropout hidden_dropout
    init_method_std apply_query_key_layer_scaling bf16 fp16 make_vocab_size_divisible_by padded_vocab_size
    tokenizer_type vocab_size
    num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_router_topk moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor
    moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias moe_router_dtype
    moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_expert_capacity_factor
    moe_pad_expert_input_to_capacity moe_token_drop_policy moe_grouped_gemm
    mtp_num_layers mtp_loss_scaling_factor multi_latent_attention softmax_type
""".split()
FILES = "vocab_file merge_file tokenizer_model".split()
_PLUGIN = AttentionFlags.names()  # flags that megatron_npu adds to the scripts
_OF_CORE = ("window_size",)  # of megatron-core's configuration; not a flag of the driver
# The driver's name -> that of core_v0.12 to 0.15.
_OLDER = {"layernorm_epsilon": "norm_epsilon", "layernorm_zero_centered_gamma": "apply_layernorm_1p"}

_HEEDED = 8.0  # pretrain_gpt.py of core_v0.12 to 0.19 does not hand --rope-scaling-factor on to the model
_END_OF_NULL = "null_tokenizer_eod_id"  # None is the last of the --vocab-size tokens

# What makes another model of those that the driver has, with the values that do not. The fields of
# TransformerConfig are looked at by themselves; these are handed to GPTModel, or choose another class.
_OTHER_MODELS: dict[str, tuple[Any, ...]] = {
    "squared_relu": (False,),
    "openai_gelu": (False,),
    "quick_geglu": (False,),
    "onnx_safe": (None, False),
    "rope_type": (None, "rope", "yarn"),  # yarn of multi-latent attention alone, as upstream sees to
    "rotary_seq_len_interpolation_factor": (None, 1),  # which no script up to 0.19 hands on to its GPT
    "add_position_embedding": (True,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None, ""),
    "hybrid_override_pattern": (None,),
    "spec": (None,),
    "use_legacy_models": (False,),
    "enable_gpt_oss": (False,),
    "export_qk_l2_norm": (False,),
}
# What a hybrid model is told of layers that a GPT has not, by the beginnings of names
_OF_HYBRIDS = ("hybrid_", "is_hybrid", "mamba_", "spec")
# Fields of TransformerConfig that say how it is computed, distributed or trained, by the beginnings of names.
_NOT_OF_THE_MODEL = tuple(
    """
    account_for apply_rope_fusion attention_backend attention_softmax_in_fp32 batch_invariant bias_
    calculate_per clone_scatter config_logger cp_comm cuda_graph disable_ distribute_saved embedding_init
    enable_cuda external_cuda fine_grained first_last flash_decode fp4 fp8 fused_ inference init_ log_
    masked_softmax memory_efficient min_offloaded moe_deepep moe_enable moe_flex moe_hybridep moe_input_jitter
    moe_layer_recompute moe_per_layer moe_permute moe_router_bias_update moe_router_force moe_router_fusion
    moe_router_padding moe_shared_expert_overlap moe_token_dispatcher moe_token_dropping moe_use
    mtp_loss num_layers_at num_layers_in offload
    output_layer_init persist pipeline qk_clip recompute symmetric test_mode tp_ transformer_impl
    use_fused use_inference use_te
    """.split()
)


def to_driver(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainer's arguments for the model in a stock script's checkpoint.

    Arguments that depend on its tokenizer are not included.

    Args:
        values: the ``args`` that the stock script saved.

    Raises:
        UsageError: the trainer does not support the model or tokenizer.
    """
    values = _as_gpt(values)
    _require_known_model(values)
    required = "num_layers hidden_size num_attention_heads seq_length max_position_embeddings".split()
    flags = [word for name in required for word in (f"--{name.replace('_', '-')}", str(_take(values, name)))]
    args = vars(arguments.parse([*flags, "--micro-batch-size", "1", "--train-iters", "0"]))
    latent = latent_flags.NAMES if values.get("multi_latent_attention") else []
    yarn = rotary_flags.YARN if values.get("position_embedding_type") == "yarn" else []  # since 0.19
    for name in (*_MODEL, *latent, *yarn, *FILES, *_PLUGIN, *_OF_CORE):
        value = _take(values, name)
        if value is not None:
            args[name] = value
    if _counts_the_end(values):
        args["vocab_size"] -= 1
        args[_END_OF_NULL] = values[_END_OF_NULL]
    result = Namespace(**args)
    result.mtp_num_layers = result.mtp_num_layers or None
    if latent:
        result.rope_type = result.rope_type or "yarn"  # as upstream
    derive.model(result)
    derive.experts(result)
    derive.expert_layout(result)
    result.data_parallel_size, result.use_cpu_initialization = 1, devices.current().is_host
    return vars(result)


def _as_gpt(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the arguments of a hybrid model of attention and MLP layers to those of an equivalent GPT
    model.

    Raises:
        UsageError: the hybrid model contains other layers.
    """
    pattern = values.get("hybrid_layer_pattern") or values.get("hybrid_override_pattern")
    if not pattern:
        return values
    told = {name: value for name, value in values.items() if not name.startswith(_OF_HYBRIDS)}
    return {**told, "num_layers": hybrid_layers.layers_of_gpt(str(pattern))}


def _counts_the_end(values: Mapping[str, Any]) -> bool:
    """Return True if ``vocab_size`` includes the end-of-document token, as for NullTokenizer since 0.18.

    In earlier versions, and in the built-in trainer, that token is added to ``vocab_size``. The version is
    recognized by a flag that the scripts introduced in 0.18.
    """
    counted = values.get("tokenizer_type") == "NullTokenizer" and _END_OF_NULL in values
    return counted and isinstance(values.get("vocab_size"), int)  # anything else is refused with the flags


def _take(values: Mapping[str, Any], name: str) -> Any:
    return values.get(name, values.get(_OLDER.get(name, name)))


def _require_known_model(values: Mapping[str, Any]) -> None:
    known = ("GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer")
    if values.get("tokenizer_type") not in known:
        raise UsageError(
            f"the checkpoint's --tokenizer-type must be {either(known)}, but it is "
            f"{values.get('tokenizer_type')}",
            remedy="The checkpoint does not store its vocabulary size, and only these tokenizers "
            "determine it.",
        )
    other = [*_other_classes(values), *_other_fields(values)]
    if other:
        raise UsageError(
            "only checkpoints of a plain GPT are supported, but this Megatron-LM checkpoint has "
            f"{', '.join(other)}",
            remedy="Nothing was written.",
        )


def _other_classes(values: Mapping[str, Any]) -> Iterator[str]:
    for name, plain in _OTHER_MODELS.items():
        if values.get(name, plain[0]) not in plain:
            yield f"{name} {values[name]}"
    factor = values.get("rope_scaling_factor")
    if values.get("use_rope_scaling") and factor not in (None, _HEEDED):
        yield (
            f"rope_scaling_factor {factor}, which the scripts ignore, because they always scale by "
            f"{_HEEDED:g}"
        )


def _other_fields(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the values of ``TransformerConfig`` fields for which the built-in trainer has no flags."""
    import dataclasses

    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    window = values.get("window_size")
    if window is not None and window[1] != 0:  # upstream's window is all that hides what comes later
        yield f"window_size {window}"
    ours = {*_MODEL, *_OF_CORE} | {field.name for field in dataclasses.fields(ModelParallelConfig)}
    for field in dataclasses.fields(TransformerConfig):
        plain = field.default
        if field.name.startswith("moe_") and not values.get("num_experts"):
            continue
        if field.name in ours or field.name.startswith(_NOT_OF_THE_MODEL) or plain is dataclasses.MISSING:
            continue
        found = values.get(field.name, plain)
        if found != plain and found is not None:
            yield f"{field.name} {found}"


def to_stock(args: Namespace, train_samples: int = 0, valid_samples: int = 0) -> Namespace:
    """Return the plain values that the stock scripts read from checkpoints.

    Args:
        args: the trainer's arguments, after ``validation.check``.
        train_samples, valid_samples: samples that the run has used.
    """
    latent = latent_flags.NAMES if args.multi_latent_attention else []
    yarn = rotary_flags.YARN if args.position_embedding_type == "yarn" else []
    values = {name: getattr(args, name) for name in (*_MODEL, *latent, *yarn)}
    values |= {old: values[name] for name, old in _OLDER.items()}
    return Namespace(
        **values,
        add_position_embedding=True,  # what they compare, whatever the positions are
        use_rotary_position_embeddings=args.position_embedding_type == "rope",
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        world_size=args.world_size,
        data_parallel_size=args.data_parallel_size,
        no_save_optim=args.no_save_optim,
        no_save_rng=args.no_save_rng,
        consumed_train_samples=train_samples,
        consumed_valid_samples=valid_samples,
    )


def beyond(args: Namespace) -> list[str]:
    """Return the settings of a model that the stock scripts do not support, each with a reason.

    With these settings, the scripts would compute a different model. ``--use-checkpoint-args`` does not help,
    because the scripts read neither scaling nor windows from a checkpoint. Windows themselves are flags of
    this plug-in.

    Args:
        args: the trainer's arguments, after ``validation.check``.
    """
    result = []
    factor = args.rotary_seq_len_interpolation_factor
    if factor is not None:
        result.append(f"--rotary-seq-len-interpolation-factor {factor}, which the scripts ignore")
    if args.use_rope_scaling:
        if args.rope_scaling_type == rotary_flags.LLAMA3 and args.rope_scaling_factor != _HEEDED:
            result.append(
                f"--rope-scaling-factor {args.rope_scaling_factor}, because the scripts always scale by "
                f"{_HEEDED:g}"
            )
        result += [
            f"--{name.replace('_', '-')} {getattr(args, name)}"
            for name, value in rotary_flags.OF_CORE.items()
            if getattr(args, name) != value
        ]
    if args.position_embedding_type == "yarn":
        result.append("--position-embedding-type yarn (supported since core_v0.19)")
    if args.add_attention_bias:
        result.append("--add-attention-bias")
    if args.null_tokenizer_eod_id is not None:
        result.append(f"--null-tokenizer-eod-id {args.null_tokenizer_eod_id} (supported since core_v0.18)")
    if args.window_attn_skip_freq is not None:
        result.append("--window-attn-skip-freq (supported since core_v0.15)")
    return result
