"""A GPT-2 in plain torch, used by ``train.py``, with the size and style of handwritten models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and MLP, each applied after a norm and added to its input ``[b, s, h]``."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.projection = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.projection(self.attention(self.norm_1(x)))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))

    def attention(self, x: Tensor) -> Tensor:
        """Return the attention output, ``[b, s, h]``."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """A decoder with learned positions, whose output layer shares the embedding's weights."""

    def __init__(self, words: int, positions: int, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, hidden), nn.Embedding(positions, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        for embedding in (self.words, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss for ``[b, s]`` ids and labels; tokens < n predict n."""
        x = self.words(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x[:, :-1]), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
