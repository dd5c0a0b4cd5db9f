"""Tiny models of every kind that the switches must take, and batches for them."""

from __future__ import annotations

import torch
from torch import nn

HIDDEN, HEADS, LAYERS, VOCABULARY, LENGTH = 32, 2, 2, 61, 12


def bert(dropout: float = 0.0) -> nn.Module:
    """Return a BERT that classifies."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def bert_batch(size: int) -> dict[str, torch.Tensor]:
    """Return a batch for ``bert``."""
    ids = torch.randint(0, VOCABULARY, (size, LENGTH))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.randint(0, 3, (size,)),
    }
