"""One of two ranks: its part of core attention under context parallelism, beside the whole sequence's.

Usage: torchrun --nproc-per-node 2 context_parallel_worker.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import megatron_npu

megatron_npu.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_npu import settings  # noqa: E402

LENGTH, BATCH, HEADS, GROUPS, SIZE = 16, 2, 4, 2, 8
column = torch.arange(LENGTH)
row = column[:, None]
FUTURE = (column > row).expand(BATCH, 1, LENGTH, LENGTH).contiguous()


def documents() -> torch.Tensor:
    """Return the mask of --reset-attention-mask: documents that end at 5 (first row of the batch) and 11."""
    other = torch.stack([(column >= end) != (row >= end) for end in (5, 11)])
    return FUTURE | other[:, None]


# name: (type of mask, mask of the data loader, configuration, our flags, which pairs are hidden)
CASES = {
    "causal": ("causal", None, {}, {}, FUTURE),
    "the loader's triangle": ("causal", FUTURE, {}, {}, FUTURE),
    "the loader's documents": ("causal", documents(), {}, {}, documents()),
    "everything": ("no_mask", None, {}, {}, torch.zeros_like(FUTURE)),
    "a window ahead": (
        "causal",
        FUTURE,
        {"window_size": (3, 2)},
        {},
        ((column < row - 3) | (column > row + 2)).expand_as(FUTURE),
    ),
    "flags": (
        "causal",
        documents(),
        {},
        {"pre_tokens": 4, "next_tokens": 0},
        documents() | (column < row - 4),
    ),
}


def own(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return what megatron-core gives this rank: the chunks r and 3 - r of four."""
    rank, chunks = dist.get_rank(), tensor.chunk(4, dim)
    return torch.cat([chunks[rank], chunks[3 - rank]], dim)


def attention(query, key, value, hidden):
    """Return attention written out, ``[s, b, n, d]`` and ``[s, b, g, d]`` to ``[s, b, n * d]``."""
    key, value = (t.repeat_interleave(HEADS // GROUPS, dim=2) for t in (key, value))
    scores = torch.einsum("ibnd,jbnd->bnij", query, key) / SIZE**0.5
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bnij,jbnd->ibnd", weights, value).flatten(2)


def compare(kind, mask, options, flags, hidden) -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * SIZE,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
        context_parallel_size=2,
        **options,
    )
    layer = DotProductAttention(config, 1, AttnMaskType[kind], "self")
    torch.manual_seed(3)
    whole = [torch.randn(LENGTH, BATCH, heads, SIZE, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)]
    parts = [own(t.detach(), 0).requires_grad_() for t in whole]
    expected = attention(*whole, hidden)
    settings.ATTENTION.pre_tokens, settings.ATTENTION.next_tokens = (
        flags.get(name) for name in ("pre_tokens", "next_tokens")
    )
    output = layer(*parts, None if mask is None else own(mask, 2))
    torch.testing.assert_close(output, own(expected, 0))
    grad = torch.randn_like(expected)
    ours = torch.autograd.grad(output, parts, own(grad, 0))
    right = torch.autograd.grad(expected, whole, grad)
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, own(b, 0))


def main() -> None:
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for name, case in CASES.items():
        compare(*case)
        if dist.get_rank() == 0:
            print("equal:", name, flush=True)


if __name__ == "__main__":
    main()
