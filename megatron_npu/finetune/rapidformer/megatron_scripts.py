"""Provide the functions that scripts for Megatron models import: the model, the tokenizer and the masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_npu.finetune.rapidformer import megatron_models, state
from megatron_npu.pretrain.data import tokenizers
from megatron_npu.pretrain.flags.plan_parts import ModelFlags, TokenizerFlags
from megatron_npu.pretrain.model import gpt

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig


def megatron_config() -> TransformerConfig:
    """Return a megatron-core configuration for a custom model, based on the flags.

    Raises:
        UsageError: the function is called outside ``train()`` of a template whose flags specify the sizes for
            megatron-core.
    """
    return gpt.transformer_config(megatron_models.flags())


def megatron_gpt() -> GPTModel:
    """Return the part of megatron-core's GPT model for this pipeline stage, configured by the flags.

    Raises:
        UsageError: see ``megatron_config``.
    """
    args = megatron_models.flags()
    return gpt.gpt(ModelFlags.of(args), gpt.transformer_config(args), None, *gpt.at_ends())


def get_tokenizer() -> Any:
    """Return the tokenizer that the flags select, with ``eod`` and ``vocab_size``.

    Raises:
        UsageError: one of its files is missing.
    """
    run = state.current()
    if run.tokenizer is None:
        run.tokenizer = tokenizers.build(TokenizerFlags.of(run.args))
    return run.tokenizer


def get_ltor_masks_and_position_ids(
    data: Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the attention mask, the loss mask and the positions of a left-to-right batch.

    The name and arguments match those in Megatron-LM.

    Args:
        data: tokens, [b, s].
        eod_token: end-of-document token.
        reset_position_ids: whether to restart positions at each document.
        reset_attention_mask: whether to let tokens attend only to their own document.
        eod_mask_loss: whether to exclude end-of-document tokens from the loss.

    Returns:
        The mask, [b, 1, s, s] bool, where True marks keys that are masked out (None for a plain causal mask,
        which attention applies itself); the loss mask, [b, s] fp32; the positions, [b, s] int64.
    """
    from megatron.core.datasets import gpt_dataset

    rows = [
        gpt_dataset._get_ltor_masks_and_position_ids(
            row, eod_token, reset_position_ids, reset_attention_mask, eod_mask_loss, reset_attention_mask
        )
        for row in data.cpu()
    ]
    masks, losses, positions = zip(*rows, strict=True)
    mask = torch.stack(masks).to(data.device) if reset_attention_mask else None
    return mask, torch.stack(losses).to(data.device), torch.stack(positions).to(data.device)
