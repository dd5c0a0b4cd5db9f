"""Add low-rank adapters (Hu et al. 2021) with peft, which trains only the adapters and a new head."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.model.blocks import repeated_blocks

ALPHA = 2  # the adapters' product is scaled by ALPHA, whatever the rank: lora_alpha = ALPHA * rank


def adapt(model: nn.Module, rank: int) -> tuple[nn.Module, str]:
    """Add low-rank adapters of the given rank to the model.

    Return the model and a log line.

    Adapters are added to the layers in peft's table for this model type. If the table has no entry for the
    type, they are added to every linear layer of the repeated blocks, or to every linear layer if there are
    no blocks. A head that pre-trained models do not have, such as a classifier, is trained in full.

    Raises:
        UsageError: the adapters' rank is not smaller than that of the matrices.
    """
    import peft

    targets, source = _targets(model)
    _require_low(model, targets, rank)
    heads = _heads(model)
    config = peft.LoraConfig(
        r=rank, lora_alpha=ALPHA * rank, target_modules=targets, modules_to_save=heads or None
    )
    with warnings.catch_warnings():  # peft 0.21 asks Transformers 5 by a name that is to go
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        adapted: nn.Module = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    parameters = list(adapted.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in parameters)
    head = f", and {', '.join(heads)} are trained fully" if heads else ""
    return (
        adapted,
        f"LoRA: rank {rank} is applied to {source}{head}; {trained:,} of {total:,} weights are trained",
    )


def _targets(model: nn.Module) -> tuple[list[str], str]:
    """Return the value for peft's ``target_modules``, and a description of the selected modules."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TABLE

    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in TABLE:
        return list(TABLE[kind]), f"{', '.join(TABLE[kind])} (peft's choice for {kind})"
    blocks = repeated_blocks(model)
    if blocks:
        names = [f"{name}.{part}" for name, block in blocks for part in _linears(block)]
        return names, f"the {len(names)} linear layers of {len(blocks)} blocks"
    names = _linears(model)
    return names, f"all {len(names)} linear layers"


def _require_low(model: nn.Module, targets: list[str], rank: int) -> None:
    """Check that each adapter has fewer weights than the matrix that it adapts.

    Raises:
        UsageError: the adapters' rank is not smaller than that of the matrices.
    """
    sides = [
        min(part.weight.shape)
        for name, part in model.named_modules()
        if any(f".{name}".endswith(f".{target}") for target in targets) and hasattr(part, "weight")
    ]
    if sides and rank >= max(sides):
        raise UsageError(
            "--lora-rank must be lower than the rank of the adapted matrices, which is at most "
            f"{max(sides)}, but got {rank}. Use a lower rank (usually 4 to 64), or train all weights."
        )


def _linears(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]


def _heads(model: Any) -> list[str]:
    """Return those modules of a Transformers model that are not in its base model or its language-model
    head.
    """
    base = getattr(model, "base_model_prefix", "")
    if not base or not hasattr(model, base) or not hasattr(model, "get_output_embeddings"):
        return []
    output = model.get_output_embeddings()
    return [
        name
        for name, part in model.named_children()
        if name != base and any(True for _ in part.parameters()) and output not in list(part.modules())
    ]
