"""Tiny models of every kind that the switches must take, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

HIDDEN, HEADS, LAYERS, VOCABULARY, LENGTH, CLASSES = 32, 2, 2, 61, 8, 3
WORDS = 300  # of the language models: more than the fewest of a fused loss; the data have VOCABULARY
Batch = dict[str, Any]


def bert(dropout: float = 0.0) -> nn.Module:
    """A BERT that classifies: its pooler and head lie outside the blocks."""
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(_bert_config(dropout))


def bert_tokens() -> nn.Module:
    """A masked-language model: one weight is input and output embeddings, with a bias there."""
    from transformers import BertForMaskedLM

    config = _bert_config(0.0)
    config.vocab_size = WORDS
    return BertForMaskedLM(config)


def gpt2() -> nn.Module:
    """A GPT-2, whose output layer is its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": WORDS, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    special = {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **special, n_positions=LENGTH))


def albert() -> nn.Module:
    """An ALBERT: one block that is passed through several times."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(**_bert_sizes(), embedding_size=16, classifier_dropout_prob=0.0)
    return AlbertForMaskedLM(config)


class Users(nn.Module):
    """A user's own: blocks in a list, tied and frozen weights, a buffer, arguments that are no tensors."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(LENGTH, HIDDEN)
        self.positions.weight.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.layers = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.layers[1].mlp[0].bias.requires_grad_(False)
        self.unused = nn.Linear(HIDDEN, 3)

    def forward(self, tokens: torch.Tensor, *, style: str, labels: torch.Tensor) -> dict[str, Any]:
        """Return ``{"loss": …, "style": …}``."""
        hidden = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden, style, factor=self.scale)
        logits = nn.functional.linear(hidden, self.embedding.weight)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return {"loss": loss, "style": style}


class Block(nn.Module):
    """Attention and a multi-layer perceptron."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True, dropout=dropout)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor, style: str, factor: torch.Tensor) -> torch.Tensor:
        """Return ``[b, s, h]``."""
        assert style == "plain"
        normed = self.norm(hidden)
        hidden = hidden + self.dropout(self.attention(normed, normed, normed, need_weights=False)[0])
        return hidden + factor * self.mlp(hidden)


class Flat(nn.Module):
    """A model without repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """Return ``{"loss": …}``."""
        logits = self.head(torch.tanh(self.embedding(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())}


def _bert_config(dropout: float) -> Any:
    from transformers import BertConfig

    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertConfig(**_bert_sizes() | dropouts, num_labels=CLASSES)


def _bert_sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 2 * HIDDEN,
        "max_position_embeddings": LENGTH,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def classes(size: int) -> Batch:
    """A batch for ``bert``."""
    return {**tokens(size), "labels": torch.randint(0, CLASSES, (size,))}


def tokens(size: int) -> Batch:
    """A batch for language models."""
    ids = torch.randint(0, VOCABULARY, (size, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def users_batch(size: int) -> Batch:
    """A batch for ``Users``."""
    ids = torch.randint(0, VOCABULARY, (size, LENGTH))
    return {"tokens": ids, "labels": ids.roll(1, 1), "style": "plain"}


@dataclass(frozen=True)
class Kind:
    """How to make a model, and a batch of a size for it."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]


KINDS = {
    "bert": Kind(bert, classes),
    "bert dropout": Kind(lambda: bert(0.3), classes),
    "bert tokens": Kind(bert_tokens, tokens),
    "gpt2": Kind(gpt2, tokens),
    "albert": Kind(albert, tokens),
    "user": Kind(Users, users_batch),
    "user dropout": Kind(lambda: Users(0.3), users_batch),
    "flat": Kind(Flat, tokens),
}
