"""Verify a conversion by comparing the tensors and logits of both checkpoints, which are read from disk.

Both models run in fp32 with weights rounded to the converted dtype, so that the results differ only in the
order of summation. Only one model is in memory at a time, and it is held in the dtype in which it is stored.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.base.installed_packages import is_installed
from megatron_npu.conversion import fp32_inference, mapped_weights
from megatron_npu.conversion.family import Family
from megatron_npu.conversion.positions import far_rotation
from megatron_npu.conversion.request import Request
from megatron_npu.pretrain.checkpoint.restore import restored
from megatron_npu.pretrain.flags.frozen_flags import Flags
from megatron_npu.pretrain.model.gpt import unwrap

# Of the largest logit. fp32 has 6e-8; sums of thousands of terms through dozens of layers leave about 1e-5.
BOUND = 1e-4
_TOKENS = 64


@dataclass(frozen=True)
class Verification:
    """The results of a verification.

    Attributes:
        tensors: the number of Hugging Face tensors, each bitwise identical to its counterpart in Megatron.
        tokens: the number of tokens that both models processed, or 0 if the logits were not compared.
        difference: the largest difference between logits.
        largest: the largest logit of Hugging Face's model.
        positions: the position at which the rotation angles were compared, or 0 if they were not compared.
        turned: the largest difference between the sines and cosines of these angles.
    """

    tensors: int
    tokens: int = 0
    difference: float = 0.0
    largest: float = 0.0
    positions: int = 0
    turned: float = 0.0


class Sides(NamedTuple):
    """The two checkpoints that a verification compares.

    Attributes:
        megatron: the folder given to ``--save``.
        hf: the folder with ``config.json`` and the weights.
        family: the model's family.
    """

    megatron: Path
    hf: Path
    family: Family


def has_reference() -> bool:
    """Return True if transformers, which provides the reference model, is installed."""
    return is_installed("transformers")


def silence(transformers: ModuleType) -> None:
    """Make transformers print only errors."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@torch.no_grad()
def verify(
    sides: Sides,
    args: Flags,
    dtype: torch.dtype,
    *,
    logits: bool,
    vocab_file: str | None = None,
    merge_file: str | None = None,
) -> Verification:
    """Compare a checkpoint of the trainer with a Hugging Face folder.

    Only one model is in memory at a time.

    Args:
        sides: the two checkpoints.
        args: the trainer's flags for the model.
        dtype: the dtype of the converted weights, to which the weights of the other side are rounded.
        logits: whether to run both models and compare their logits too.
        vocab_file, merge_file: the current paths of the tokenizer's files, if they have moved.

    Raises:
        UsageError: the two sides differ.
    """
    megatron, hf, family = sides
    tokens = _tokens(args.tokenizer_vocab_size, min(_TOKENS, args.max_position_embeddings))
    theirs, turned = _hf_results(hf, family, args, tokens, dtype) if logits else (None, None)
    gc.collect()
    with restored(str(megatron), vocab_file, merge_file, widened_by_caller=True, moe_grouped_gemm=False) as (
        args,
        module,
        _,
    ):
        gpt = unwrap(module)
        number = _compare_tensors(
            dict(gpt.named_parameters()), mapped_weights.open_folder(hf, family), family, args, dtype
        )
        if theirs is None:
            return Verification(number)
        difference = 0.0 if turned is None else far_rotation.difference(gpt, args, turned)
        ours = _megatron_logits(gpt, tokens, dtype)[..., : args.tokenizer_vocab_size]
    result = Verification(
        number,
        tokens.numel(),
        (ours - theirs).abs().max().item(),
        theirs.abs().max().item(),
        0 if turned is None else far_rotation.length(args),
        difference,
    )
    if not result.difference <= BOUND * result.largest:  # nan is refused as well
        raise UsageError(
            f"the logits of the original and the converted model differ by {result.difference:.3g} on "
            f"{result.tokens} tokens; the difference must be at most {BOUND:g} of the largest logit, "
            f"{result.largest:.3g}. Nothing was written, because the converted model computes different "
            "results. Please report it."
        )
    if not result.turned <= far_rotation.bound(result.positions):
        raise UsageError(
            f"after {result.positions} tokens the original and the converted model rotate queries "
            "and keys by different angles: the sines of the angles differ by "
            f"{result.turned:.3g}, but may differ by at most "
            f"{far_rotation.bound(result.positions):.3g}. Nothing was written. Please report it."
        )
    return result


def told(
    request: Request, megatron: Path, hf: Path, family: Family, args: Flags, dtype: str
) -> Iterator[str]:
    """Verify a conversion, and yield its log lines.

    Raises:
        UsageError: the two sides differ.
    """
    logits = has_reference() if request.proof is None else request.proof == "logits"
    result = verify(
        Sides(megatron, hf, family),
        args,
        mapped_weights.DTYPES[dtype],
        logits=logits,
        vocab_file=request.vocab_file,
        merge_file=request.merge_file,
    )
    yield f"{result.tensors} tensors of type {dtype} are bitwise identical on both sides"
    if logits:
        yield (
            f"logits of both models in fp32 on {result.tokens} tokens: the largest difference is "
            f"{result.difference:.2e}, the largest logit is {result.largest:.2e}, and the "
            f"limit is {BOUND:g} of the largest logit"
        )
        if result.positions:
            yield (
                f"rotation angles of both models at the end of {result.positions} tokens: the largest "
                f"difference of sines is {result.turned:.2e}, and the limit is "
                f"{far_rotation.bound(result.positions):.1e}"
            )
    elif request.proof is None:
        yield (
            'transformers is not installed, so the logits were NOT compared (pip install "megatron_npu[hf]")'
        )
    else:
        yield "the logits were NOT compared (--proof tensors)"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _compare_tensors(
    parameters: dict[str, Tensor],
    found: mapped_weights.MappedWeights,
    family: Family,
    args: Flags,
    dtype: torch.dtype,
) -> int:
    """Check that all tensors are bitwise identical, and return their number.

    Raises:
        UsageError: a tensor differs.
    """
    number = 0
    for name, tensor in mapped_weights.to_hf(parameters, family.weight_map(args)):
        if not all(torch.equal(*pair) for pair in _pieces(tensor, found.in_pieces(name), dtype)):
            raise UsageError(
                f"{name} differs from the converted tensor, but the two must be bitwise identical. Please "
                "report it."
            )
        number += 1
    return number


def _pieces(tensor: Tensor, stored: Iterator[Tensor], dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of a tensor's rows, each paired with the stored rows to compare it with.

    Both are rounded to ``dtype``.
    """
    first = 0
    for rows in stored:
        ours = tensor[first : first + len(rows)] if tensor.dim() else tensor
        first += len(rows) if tensor.dim() else 1
        yield ours.cpu().to(dtype), rows.to(dtype)
    if first != (len(tensor) if tensor.dim() else 1):
        raise AssertionError("the parts of a tensor do not add up to the whole")


def _tokens(vocabulary: int, number: int) -> Tensor:
    """Return tokens ``[1, s]``, sampled from the whole vocabulary with a fixed seed."""
    return torch.randint(vocabulary, (1, number), generator=torch.Generator().manual_seed(0))


def _megatron_logits(gpt: Any, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits ``[1, s, padded V]`` in fp32 on the host. The model cannot be used afterwards."""
    embeddings = [gpt.embedding.word_embeddings, getattr(gpt.embedding, "position_embeddings", None)]
    fp32_inference.run(gpt, dtype, embeddings=embeddings, output=gpt.output_layer, returns_bias=True)
    tokens = tokens.to(devices.current().torch_device())
    positions = torch.arange(tokens.size(1), device=tokens.device)[None]
    return gpt(tokens, positions, None, runtime_gather_output=True).float().cpu()


def _hf_results(
    folder: Path, family: Family, args: Flags, tokens: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Compute the results of transformers' model on the host in fp32, without fused attention.

    The results are the logits [1, s, V], and the sines and cosines that ``far_rotation`` compares.

    Raises:
        UsageError: transformers cannot load the model.
    """
    import transformers

    silence(transformers)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder),
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation="eager",
            dtype=mapped_weights.stored_dtype(mapped_weights.open_folder(folder, family)),
        ).eval()
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # of a config.json that it misreads
        raise UsageError(
            f"transformers {transformers.__version__} cannot load the converted model in {folder} to verify "
            f"the conversion: {_first_line(error)}. Correct its config.json, or pass --proof tensors."
        ) from error
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    fp32_inference.run(
        model, dtype, embeddings=embeddings, output=model.get_output_embeddings(), returns_bias=False
    )
    logits = model(tokens).logits
    return logits, far_rotation.theirs(model, args)  # behind them: dynamic scaling remembers the longest text
