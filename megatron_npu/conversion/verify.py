"""The proof of a conversion: both sides are read from disk again and compared, tensors and logits.

Both models run in fp32 on weights that have been rounded to the type of the converted ones, so that what is
left is the order of sums. One model is in memory at a time, in the type that it is stored in.
"""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.base.installed_packages import is_installed
from megatron_npu.conversion import fp32, weights
from megatron_npu.conversion.family import Family
from megatron_npu.pretrain.checkpoint.restore import restored
from megatron_npu.pretrain.model.gpt import unwrap

# Of the largest logit. fp32 has 6e-8; sums of thousands of terms through dozens of layers leave about 1e-5.
BOUND = 1e-4
_TOKENS = 64


@dataclass(frozen=True)
class Verification:
    """What was compared.

    Attributes:
        tensors: tensors of Hugging Face, each equal to the bit to its part of Megatron's.
        tokens: tokens that both models have read; 0 if the logits were not compared.
        difference: the largest difference of two logits.
        largest: the largest logit of Hugging Face's model.
    """

    tensors: int
    tokens: int = 0
    difference: float = 0.0
    largest: float = 0.0


def has_reference() -> bool:
    """Return whether transformers, which runs the other model, is installed."""
    return is_installed("transformers")


def silence(transformers: ModuleType) -> None:
    """Let transformers print nothing but errors."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@torch.no_grad()
def verify(
    megatron: Path,
    hf: Path,
    family: Family,
    args: Namespace,
    dtype: torch.dtype,
    *,
    logits: bool,
    vocab_file: str | None = None,
    merge_file: str | None = None,
) -> Verification:
    """Compare a checkpoint of the driver with a folder of Hugging Face, one model in memory at a time.

    Args:
        megatron: what ``--save`` would be.
        hf: with ``config.json`` and weights.
        family: of the model.
        args: the driver's arguments of the model.
        dtype: type of the converted weights; those of the other side are rounded to it.
        logits: run both models, too.
        vocab_file, merge_file: where the files of the checkpoint's tokenizer are now, if they have moved.

    Raises:
        UsageError: they differ.
    """
    tokens = _tokens(args.tokenizer_vocab_size, min(_TOKENS, args.max_position_embeddings))
    theirs = _hf_logits(hf, family, tokens, dtype) if logits else None
    gc.collect()
    with restored(str(megatron), vocab_file, merge_file, widened_by_caller=True, moe_grouped_gemm=False) as (
        args,
        module,
        _,
    ):
        gpt = unwrap(module)
        number = _compare_tensors(
            dict(gpt.named_parameters()), weights.open_folder(hf, family), family, args, dtype
        )
        if theirs is None:
            return Verification(number)
        ours = _megatron_logits(gpt, tokens, dtype)[..., : args.tokenizer_vocab_size]
    result = Verification(
        number, tokens.numel(), (ours - theirs).abs().max().item(), theirs.abs().max().item()
    )
    if not result.difference <= BOUND * result.largest:  # nan is refused as well
        raise UsageError(
            f"the logits of the two models differ by {result.difference:.3g} (the largest is "
            f"{result.largest:.3g}), on {result.tokens} tokens",
            f"at most {BOUND:g} of the largest",
            "Nothing was written: a checkpoint that talks gibberish is worth nothing. Please report it.",
        )
    return result


def told(
    given: Namespace, megatron: Path, hf: Path, family: Family, args: Namespace, dtype: str
) -> Iterator[str]:
    """Prove a conversion and yield the lines that say so.

    Raises:
        UsageError: the two sides differ.
    """
    logits = has_reference() if given.proof is None else given.proof == "logits"
    result = verify(
        megatron,
        hf,
        family,
        args,
        weights.DTYPES[dtype],
        logits=logits,
        vocab_file=given.vocab_file,
        merge_file=given.merge_file,
    )
    yield f"{result.tensors} tensors of type {dtype}, each equal to the bit on both sides"
    if logits:
        yield (
            f"logits of both models in fp32 on {result.tokens} tokens: largest difference "
            f"{result.difference:.2e}, largest logit {result.largest:.2e}, allowed {BOUND:g} of it"
        )
    elif given.proof is None:
        yield 'transformers is not installed: the logits were NOT compared (pip install "megatron_npu[hf]")'
    else:
        yield "the logits were NOT compared (--proof tensors)"


def _compare_tensors(
    parameters: dict[str, Tensor], found: weights.Weights, family: Family, args: Namespace, dtype: torch.dtype
) -> int:
    """Return how many tensors are equal, which is all of them."""
    number = 0
    for name, tensor in weights.to_hf(parameters, family.weight_map(args)):
        if not all(torch.equal(*pair) for pair in _pieces(tensor, found.in_pieces(name), dtype)):
            raise UsageError(
                f"{name} is not what was converted", "the same numbers on both sides", "Please report it."
            )
        number += 1
    return number


def _pieces(tensor: Tensor, stored: Iterator[Tensor], dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows of a tensor and of what is stored of it, both rounded."""
    first = 0
    for rows in stored:
        ours = tensor[first : first + len(rows)] if tensor.dim() else tensor
        first += len(rows) if tensor.dim() else 1
        yield ours.cpu().to(dtype), rows.to(dtype)
    if first != (len(tensor) if tensor.dim() else 1):
        raise AssertionError("the pieces are not the whole")


def _tokens(vocabulary: int, number: int) -> Tensor:
    """Return tokens [1, s] drawn from the whole vocabulary, the same each time."""
    return torch.randint(vocabulary, (1, number), generator=torch.Generator().manual_seed(0))


def _megatron_logits(gpt: Any, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return logits [1, s, padded V] in fp32 on the host; the model is of no other use afterwards."""
    embeddings = [gpt.embedding.word_embeddings, getattr(gpt.embedding, "position_embeddings", None)]
    fp32.run(gpt, dtype, embeddings=embeddings, output=gpt.output_layer, returns_bias=True)
    tokens = tokens.to(devices.current().torch_device())
    positions = torch.arange(tokens.size(1), device=tokens.device)[None]
    return gpt(tokens, positions, None, runtime_gather_output=True).float().cpu()


def _hf_logits(folder: Path, family: Family, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return logits [1, s, V] in fp32, computed on the host by transformers, without its fused attention."""
    import transformers

    silence(transformers)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder),
        local_files_only=True,
        trust_remote_code=False,
        attn_implementation="eager",
        dtype=weights.stored_dtype(weights.open_folder(folder, family)),
    ).eval()
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    fp32.run(model, dtype, embeddings=embeddings, output=model.get_output_embeddings(), returns_bias=False)
    return model(tokens).logits
