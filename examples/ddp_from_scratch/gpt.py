"""A GPT in plain PyTorch, its loss, and text from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of tiktoken have it."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class SelfAttention(nn.Module):
    """Causal attention of several heads. [b, s, h] -> [b, s, h]"""

    def __init__(self, size: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query_key_value = nn.Linear(size, 3 * size, bias=bias)
        self.output = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        found = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.output(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer layer with its norms in front. [b, s, h] -> [b, s, h]"""

    def __init__(self, size: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = SelfAttention(size, heads, dropout, bias)
        self.mlp = nn.Sequential(
            nn.Linear(size, 4 * size), nn.GELU(approximate="tanh"), nn.Linear(4 * size, size)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPTModel(nn.Module):
    """Tokens [b, s] to logits [b, s, vocabulary]."""

    def __init__(
        self,
        embedding_dim: int,
        num_layers: int,
        num_heads: int,
        context_len: int,
        vocabulary_size: int,
        dropout: float,
        qkv_bias: bool,
    ) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(vocabulary_size, embedding_dim)
        self.pos_emb = nn.Embedding(context_len, embedding_dim)
        self.dropout = nn.Dropout(dropout)
        layers = (Block(embedding_dim, num_heads, dropout, qkv_bias) for _ in range(num_layers))
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(embedding_dim)
        self.logits = nn.Linear(embedding_dim, vocabulary_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tok_emb(tokens) + self.pos_emb(positions))
        return self.logits(self.norm(self.blocks(x)))


def calc_loss_batch(inputs: Tensor, targets: Tensor, model: nn.Module, device: int) -> Tensor:
    """Return the mean loss of a batch, in nats a token; both tensors [b, s]."""
    logits = model(inputs.to(device, non_blocking=True))
    return F.cross_entropy(logits.flatten(0, 1), targets.to(device, non_blocking=True).flatten())


@torch.no_grad()
def calc_loss_loader(
    loader: Iterable[tuple[Tensor, Tensor]], model: nn.Module, device: int, num_batches: int
) -> float:
    """Return the mean loss of the first batches of a loader, without dropout."""
    was_training = model.training
    model.eval()
    losses = [
        calc_loss_batch(*batch, model, device).item() for batch in itertools.islice(loader, num_batches)
    ]
    model.train(was_training)
    return sum(losses) / len(losses) if losses else float("nan")


@torch.no_grad()
def generate_text(
    model: nn.Module,
    start_context: str,
    max_new_tokens: int,
    tokenizer: Tokenizer,
    context_size: int,
    top_k: int = 1,
    compact_format: bool = False,
) -> str:
    """Return the start and what the model adds to it, each token drawn among the ``top_k`` likeliest.

    Args:
        compact_format: put all of it on one line.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    tokens = torch.tensor([tokenizer.encode(start_context)], device=device)
    for _ in range(max_new_tokens):
        best, ids = model(tokens[:, -context_size:])[:, -1].topk(top_k)
        drawn = torch.multinomial(best.softmax(-1), 1) if top_k > 1 else torch.zeros_like(ids)
        tokens = torch.cat([tokens, ids.gather(1, drawn)], dim=1)
    model.train(was_training)
    text = tokenizer.decode(tokens[0].tolist())
    return " ".join(text.split()) if compact_format else text
