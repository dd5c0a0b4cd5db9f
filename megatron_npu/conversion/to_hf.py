"""Convert a checkpoint of the built-in trainer to a Hugging Face folder."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_npu.base import files
from megatron_npu.conversion import families, hf_files, mapped_weights, model_card, verify
from megatron_npu.conversion.config import NAME as CONFIG
from megatron_npu.conversion.family import Family
from megatron_npu.conversion.request import Request
from megatron_npu.conversion.tokenizer import tokenizer_files
from megatron_npu.pretrain.checkpoint import stock_checkpoints
from megatron_npu.pretrain.checkpoint.restore import restored
from megatron_npu.pretrain.flags.frozen_flags import Flags
from megatron_npu.pretrain.model import gpt


def convert(request: Request, part: Path) -> Iterator[str]:
    """Write the Hugging Face folder to ``part``, and yield log lines."""
    root = Path(request.source)
    files_of_it = (request.vocab_file, request.merge_file)
    # each expert by itself, as Hugging Face has them
    with restored(str(root), *files_of_it, moe_grouped_gemm=False) as (args, module, tokenizer):
        family = families.of_arguments(args, tokenizer_files.model_type(root, args))
        dtype = request.dtype or ("bf16" if args.bf16 else "fp16" if args.fp16 else "fp32")
        values = family.config(args)
        extra_keys = tokenizer_files.copy_from_checkpoint(root, args, tokenizer, part)
        kind = str(mapped_weights.DTYPES[dtype]).removeprefix("torch.")
        named = {**extra_keys, **values, "dtype": kind, "torch_dtype": kind}  # transformers 5, and before
        files.write(part / CONFIG, json.dumps(named, indent=2, sort_keys=True) + "\n")
        parameters = dict(gpt.unwrap(module).named_parameters())
        _write(part, parameters, family, args, dtype, request.max_shard_gb, request.hf_weights)
        model_card.write(part, stock_checkpoints.existing(root), args, values, dtype)
    del module, parameters
    gc.collect()  # modules know each other, so that nothing else frees them
    yield from tokenizer_files.prove(tokenizer, part)
    yield from verify.told(request, root, part, family, args, dtype)
    yield f"{values['architectures'][0]}; {args.tokenizer_type}"


def _write(
    part: Path,
    parameters: dict[str, torch.Tensor],
    family: Family,
    args: Flags,
    dtype: str,
    shard_gb: float,
    form: str,
) -> None:
    kind = mapped_weights.DTYPES[dtype]
    shapes = {name: parameter.detach().to("meta", kind) for name, parameter in parameters.items()}
    planned = dict(mapped_weights.to_hf(shapes, family.weight_map(args)))
    tensors = (
        (name, tensor.cpu().to(kind))
        for name, tensor in mapped_weights.to_hf(parameters, family.weight_map(args))
    )
    hf_files.write(part, tensors, planned, int(shard_gb * 1e9), form)
