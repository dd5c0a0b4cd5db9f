"""Write one checkpoint file per rank, for Megatron-LM 285068c8 (GPT-2) or megatron-core (other models).

285068c8 does not support rotary positions, RMSNorm or gated MLPs. megatron-core's scripts also load the
format (``--ckpt-format torch``), with their own weight names and with layers counted from 0 in each stage.

These functions take all frozen flags of the model, because a file contains them as the Namespace that
upstream's scripts read.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.options.attention_flags import AttentionFlags
from megatron_npu.pretrain.checkpoint import checkpoint_files
from megatron_npu.pretrain.checkpoint.torch_format import names, shards
from megatron_npu.pretrain.checkpoint.torch_format.files import NAMES
from megatron_npu.pretrain.flags import stock_arguments
from megatron_npu.pretrain.flags.frozen_flags import Flags

UPSTREAM = "Megatron-LM 285068c8"
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
# Attribute of the driver's arguments, the only value that 285068c8 has, what it is called.
_ONLY: tuple[tuple[str, object, str], ...] = (
    ("position_embedding_type", "learned_absolute", "learned positions"),
    ("normalization", "LayerNorm", "LayerNorm"),
    ("layernorm_zero_centered_gamma", False, "LayerNorm with its scale stored directly"),
    ("swiglu", False, "an MLP with GELU"),
    ("add_bias_linear", True, "biases in every linear layer"),
    ("qk_layernorm", False, "no query-key norm"),
    ("untie_embeddings_and_output_weights", False, "an output layer tied to the embedding"),
    ("pre_tokens", None, "no window"),
    ("num_experts", None, "no experts"),
)
# Arguments that 285068c8 compares with those of the run that loads, or takes over, or its tools ask for.
_KEPT = """
    num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels seq_length
    max_position_embeddings layernorm_epsilon attention_dropout hidden_dropout init_method_std
    apply_query_key_layer_scaling bias_gelu_fusion bf16 fp16 padded_vocab_size tokenizer_type vocab_file
    merge_file
""".split()


def is_of_285068c8(args: Flags) -> bool:
    """Return True if the files are written for Megatron-LM 285068c8.

    This is the case for models with learned positions.
    """
    return args.position_embedding_type == "learned_absolute"


def require_writable(args: Flags, tensor: int, pipeline: int) -> None:
    """Check that Megatron's scripts can load the model, and that it can be split into the given sizes.

    Args:
        args: the trainer's arguments for the model.
        tensor, pipeline: the model-parallel sizes.

    Raises:
        UsageError: a property of the model is not supported; the error names it.
    """
    if is_of_285068c8(args):
        _require_model_of_285068c8(args)
    else:
        _require_model_of_core(args)
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        if getattr(args, name) % tensor:
            raise _refusal(
                f"--tensor-model-parallel-size must divide {name} {getattr(args, name)}, but got {tensor}"
            )
    if args.num_layers % pipeline:
        raise _refusal(
            f"--pipeline-model-parallel-size must divide the {args.num_layers} layers, but got {pipeline}"
        )


def _require_model_of_285068c8(args: Flags) -> None:
    for name, value, meaning in _ONLY:
        if getattr(args, name) != value:
            raise _refusal(
                f"{UPSTREAM} supports only {meaning}, but the model has {name} {getattr(args, name)}"
            )
    if args.num_query_groups != args.num_attention_heads:
        raise _refusal(
            f"{UPSTREAM} supports only separate keys and values for each head, but the model has "
            f"{args.num_query_groups} query groups"
        )
    if args.tokenizer_type != "GPT2BPETokenizer":
        raise _refusal(
            f"{UPSTREAM} requires GPT-2's vocab.json and merges.txt for text, but the model has the "
            f"tokenizer {args.tokenizer_type}"
        )


def _require_model_of_core(args: Flags) -> None:
    if args.num_experts is not None:
        raise _refusal(
            "a model with experts is not supported, because the format does not store where each expert is"
        )
    unknown = [what for what in stock_arguments.beyond(args) if "core_v" not in what]
    if unknown:
        raise _refusal(f"the flags of megatron-core's scripts cannot describe a model with {unknown[0]}")


def _refusal(problem: str) -> UsageError:
    return UsageError(
        f"--ckpt-format torch: {problem}", remedy="Nothing was written; torch_dist has no such limits."
    )


def write(root: Path, args: Flags, weights: Mapping[str, Tensor], tensor: int, pipeline: int) -> None:
    """Write ``release/mp_rank_TT[_PPP]/model_optim_rng.pt`` for each rank, and the tracker file.

    Args:
        root: the folder to pass to ``--load``.
        args: the trainer's arguments for the model; ``make_vocab_size_divisible_by`` includes all ranks.
        weights: the whole model under megatron-core's names.
        tensor, pipeline: model-parallel sizes.
    """
    place = root / checkpoint_files.RELEASE
    legacy = is_of_285068c8(args)
    described = _arguments(args, tensor, pipeline) if legacy else _arguments_of_core(args, tensor, pipeline)
    common = {"args": described, "checkpoint_version": 3.0, "iteration": 0}
    for stage in range(pipeline):
        for rank in range(tensor):
            folder = place / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else ""))
            folder.mkdir(parents=True)
            parts = _of_rank(args, weights, (rank, tensor), (stage, pipeline))
            model = _nested(parts) if legacy else dict(parts)
            if pipeline > 1 and stage == pipeline - 1 and not args.untie_embeddings_and_output_weights:
                last = _part(_EMBEDDING, weights[_EMBEDDING], rank, tensor, gated=False)
                model |= {"word_embeddings_for_head": {"weight": last}} if legacy else {_OUTPUT: last}
            with files.writing(folder / NAMES[0]) as stream:
                torch.save({**common, "model": model}, stream)
    files.write(root / checkpoint_files.TRACKER, checkpoint_files.RELEASE)


def _of_rank(
    args: Flags, weights: Mapping[str, Tensor], tensor: tuple[int, int], pipeline: tuple[int, int]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each weight, and the part of the weight for the given rank.

    ``tensor`` and ``pipeline`` are pairs (rank, size).
    """
    stage, stages = pipeline
    count = args.num_layers // stages
    for name, weight in weights.items():
        layer = next(iter(names.layers_in({name: None})), None)
        if layer is not None:
            home = layer // count
            name = names.renumbered(name, -home * count)
        else:
            home = 0 if name.startswith("embedding.") else stages - 1
        if home == stage:
            yield name, _part(name, weight, *tensor, gated=args.swiglu)


def _part(name: str, weight: Tensor, rank: int, size: int, *, gated: bool) -> Tensor:
    # a copy: torch.save writes all of the memory that a view is a part of
    part = shards.cut(name, weight, size, gated=gated)[rank]
    return part.detach().clone(memory_format=torch.contiguous_format)


def _nested(items: Iterator[tuple[str, Tensor]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for known, value in items:
        *folders, name = names.to_285068c8(known)
        place = result
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = value
    return result


def _arguments_of_core(args: Flags, tensor: int, pipeline: int) -> Namespace:
    values = vars(stock_arguments.to_stock(args)) | {
        "make_vocab_size_divisible_by": args.make_vocab_size_divisible_by // tensor,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "ckpt_format": "torch",
        **{name: getattr(args, name) for name in (*stock_arguments.FILES, *AttentionFlags.names())},
    }
    if args.null_tokenizer_eod_id is not None:  # of 0.18, where the size counts the end of document
        values |= {
            "null_tokenizer_eod_id": args.null_tokenizer_eod_id,
            "vocab_size": args.vocab_size + 1,
        }
    return Namespace(**values)


def _arguments(args: Flags, tensor: int, pipeline: int) -> Namespace:
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    return Namespace(
        **{name: getattr(args, name) for name in _KEPT},
        make_vocab_size_divisible_by=args.make_vocab_size_divisible_by // tensor,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        num_layers_per_virtual_pipeline_stage=None,
        data_parallel_random_init=False,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        bert_binary_head=True,
        params_dtype=dtype,
    )


def flags(args: Flags, tensor: int, pipeline: int) -> list[str]:
    """Return the flags that 285068c8 needs to load the model."""
    values = {
        "--num-layers": args.num_layers,
        "--hidden-size": args.hidden_size,
        "--ffn-hidden-size": args.ffn_hidden_size,
        "--num-attention-heads": args.num_attention_heads,
        "--kv-channels": args.kv_channels,
        "--seq-length": args.seq_length,
        "--max-position-embeddings": args.max_position_embeddings,
        "--layernorm-epsilon": args.layernorm_epsilon,
        "--attention-dropout": args.attention_dropout,
        "--hidden-dropout": args.hidden_dropout,
        "--init-method-std": args.init_method_std,
        "--make-vocab-size-divisible-by": args.make_vocab_size_divisible_by // tensor,
        "--tensor-model-parallel-size": tensor,
        "--pipeline-model-parallel-size": pipeline,
        "--tokenizer-type": args.tokenizer_type,
        "--vocab-file": args.vocab_file,
        "--merge-file": args.merge_file,
    }
    switches = [] if args.bias_gelu_fusion else ["--no-bias-gelu-fusion"]
    switches += ["--bf16"] if args.bf16 else ["--fp16"] if args.fp16 else []
    return [word for flag, value in values.items() for word in (flag, str(value))] + switches
