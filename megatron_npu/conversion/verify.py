"""The proof of a conversion: both sides are read from disk again and compared, tensors and logits.

Both models run in fp32 on weights that have been rounded to the type of the converted ones, so that what is
left is the order of sums.
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from megatron_npu import devices
from megatron_npu.conversion import weights
from megatron_npu.conversion.families import Family
from megatron_npu.errors import UsageError
from megatron_npu.training.model import unwrap
from megatron_npu.training.restore import restored

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
    return importlib.util.find_spec("transformers") is not None


def silence(transformers: ModuleType) -> None:
    """Let transformers print nothing but errors."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@torch.no_grad()
def verify(
    megatron: Path,
    hf: Path,
    family: Family,
    dtype: torch.dtype,
    *,
    logits: bool,
    vocab_file: str | None = None,
    merge_file: str | None = None,
) -> Verification:
    """Compare a checkpoint of the driver with a folder of Hugging Face.

    Args:
        megatron: what ``--save`` would be.
        hf: with ``config.json`` and weights.
        family: of the model.
        dtype: type of the converted weights; those of the other side are rounded to it.
        logits: run both models, too.
        vocab_file, merge_file: where the files of the checkpoint's tokenizer are now, if they have moved.

    Raises:
        UsageError: they differ.
    """
    with restored(str(megatron), vocab_file, merge_file, bf16=False, fp16=False) as (args, module, _):
        gpt = unwrap(module)
        for parameter in gpt.parameters():
            parameter.copy_(_rounded(parameter, dtype))
        tensors = _compare_tensors(
            dict(gpt.named_parameters()), weights.open_folder(hf, family), family, args, dtype
        )
        if not logits:
            return Verification(tensors)
        tokens = _tokens(args.tokenizer_vocab_size, min(_TOKENS, args.max_position_embeddings))
        ours = _megatron_logits(gpt, tokens)[..., : args.tokenizer_vocab_size]
    del gpt, module
    theirs = _hf_logits(hf, tokens, dtype)
    result = Verification(
        tensors, tokens.numel(), (ours - theirs).abs().max().item(), theirs.abs().max().item()
    )
    if not result.difference <= BOUND * result.largest:  # nan is refused as well
        raise UsageError(
            f"the logits of the two models differ by {result.difference:.3g} (the largest is "
            f"{result.largest:.3g}), on {result.tokens} tokens",
            f"at most {BOUND:g} of the largest",
            "Nothing was written: a checkpoint that talks gibberish is worth nothing. Please report it.",
        )
    return result


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).float()


def _compare_tensors(
    parameters: dict[str, Tensor], found: weights.Weights, family: Family, args: Namespace, dtype: torch.dtype
) -> int:
    """Return how many tensors are equal, which is all of them."""
    number = 0
    for name, tensor in weights.to_hf(parameters, family.weight_map(args)):
        if not torch.equal(tensor.cpu(), _rounded(found.read(name), dtype)):
            raise UsageError(
                f"{name} is not what was converted", "the same numbers on both sides", "Please report it."
            )
        number += 1
    return number


def _tokens(vocabulary: int, number: int) -> Tensor:
    """Return tokens [1, s] drawn from the whole vocabulary, the same each time."""
    return torch.randint(vocabulary, (1, number), generator=torch.Generator().manual_seed(0))


def _megatron_logits(gpt: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Return logits [1, s, padded V] in fp32 on the host."""
    tokens = tokens.to(devices.current().torch_device())
    positions = torch.arange(tokens.size(1), device=tokens.device)[None]
    return gpt(tokens, positions, None, runtime_gather_output=True).float().cpu()


def _hf_logits(folder: Path, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return logits [1, s, V] in fp32, computed on the host by transformers, without its fused attention."""
    import transformers

    silence(transformers)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), local_files_only=True, attn_implementation="eager"
    )
    model = model.float().eval()
    for parameter in model.parameters():
        parameter.copy_(_rounded(parameter, dtype))
    return model(tokens).logits
