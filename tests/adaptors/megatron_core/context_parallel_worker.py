"""One of two, four or eight ranks: its part of core attention under context parallelism, beside the whole's.

Usage: torchrun --nproc-per-node 2|4|8 context_parallel_worker.py
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

import megatron_npu

megatron_npu.install()

from megatron.core import parallel_state, tensor_parallel, utils  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_npu import devices  # noqa: E402
from megatron_npu.base import settings  # noqa: E402
from megatron_npu.ops import dispatch  # noqa: E402
from megatron_npu.ops.attention.context_parallel.packed import token_indices  # noqa: E402
from megatron_npu.options.attention_flags import AttentionFlags  # noqa: E402

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.set_default_device(devices.current().torch_device())
RANKS = int(os.environ["WORLD_SIZE"])
LENGTH, BATCH, SIZE = 8 * RANKS, 2, 8
HEADS, GROUPS = {2: (4, 2), 4: (4, 2), 8: (8, 8)}[RANKS]
column = torch.arange(LENGTH)
row = column[:, None]
FUTURE = (column > row).expand(BATCH, 1, LENGTH, LENGTH).contiguous()


def documents() -> torch.Tensor:
    """Return the mask of --reset-attention-mask: documents that end at 5 (first row of the batch) and 11."""
    other = torch.stack([(column >= end) != (row >= end) for end in (5, 11)])
    return FUTURE | other[:, None]


COMMUNICATION = {2: ("p2p", "all_gather", "a2a"), 4: ("p2p", "a2a+p2p"), 8: ("p2p", "a2a", "a2a+p2p")}[RANKS]
RINGS = ("p2p", "a2a+p2p")
HIERARCHY = None if RANKS == 2 else [2, RANKS // 2]
# What a ring does not compute, and says: these gather.
NO_RING = ("the loader's documents", "flags")

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
    """Return what megatron-core gives this rank: the chunks r and 2·ranks - 1 - r."""
    rank, chunks = dist.get_rank(), tensor.chunk(2 * RANKS, dim)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim)


def attention(query, key, value, hidden, sink=None):
    """Return attention written out, ``[s, b, n, d]`` and ``[s, b, g, d]`` to ``[s, b, n * d]``."""
    key, value = (t.repeat_interleave(HEADS // GROUPS, dim=2) for t in (key, value))
    scores = torch.einsum("ibnd,jbnd->bnij", query, key) / SIZE**0.5
    scores = scores.masked_fill(hidden, float("-inf"))
    total = scores.logsumexp(-1, keepdim=True)
    if sink is not None:
        total = torch.logaddexp(total, sink.view(1, -1, 1, 1))
    weights = (scores - total).exp()
    return torch.einsum("bnij,jbnd->ibnd", weights, value).flatten(2)


def layer_of(kind: str, communication: str, options: dict, flags: dict) -> DotProductAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * SIZE,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
        context_parallel_size=RANKS,
        hierarchical_context_parallel_sizes=HIERARCHY,
        **options,
    )
    config.attention_flags = AttentionFlags(**flags)
    return DotProductAttention(config, 1, AttnMaskType[kind], "self", cp_comm_type=communication)


def tensors(batch: int) -> list[torch.Tensor]:
    """Return queries, keys and values of the whole sequence, ``[s, b, n or g, d]``."""
    torch.manual_seed(3)
    return [torch.randn(LENGTH, batch, heads, SIZE, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)]


def check(output, parts, expected, whole, part_of) -> None:
    """Compare this rank's part, values and gradients; ``part_of`` cuts it out of the whole."""
    torch.testing.assert_close(output, part_of(expected))
    grad = torch.randn_like(expected)
    ours = torch.autograd.grad(output, parts, part_of(grad))
    right = torch.autograd.grad(expected, whole, grad, retain_graph=True)
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, part_of(b))


@contextlib.contextmanager
def sends(right: int | None) -> Iterator[None]:
    """Check on simulated NPUs how many bytes a rank hands over to HCCL, forward and backward; None: any."""
    if right is None or not settings.SIM.enabled():
        yield
        return
    from megatron_npu.sim import counting

    with counting() as counts:
        yield
    found = counts.total_communication.bytes
    assert found == right, f"{found} bytes sent instead of {right}: {counts.communication}"


def bytes_of(communication: str, ranks: int, batch: int) -> int | None:
    """Return what attention of all of ``LENGTH`` over ``ranks`` sends, in fp32; None for ways not counted.

    A ring of c: keys and values c - 1 times forward; backward again, and their gradients c times. Near
    ranks hand over all heads of queries, keys, values and output, and in backward of their gradients.
    """
    if communication not in RINGS:
        return None
    of_heads = LENGTH // ranks * batch * SIZE * 4  # of one head
    ring = RANKS // HIERARCHY[0] if communication == "a2a+p2p" else ranks
    total = 2 * of_heads * GROUPS * (3 * ring - 2 if ring > 1 else 0)
    return total + 4 * of_heads * (HEADS + GROUPS) * (communication == "a2a+p2p")


def compare(communication, kind, mask, options, flags, hidden) -> None:
    layer = layer_of(kind, communication, options, flags)
    whole = tensors(BATCH)
    parts = [own(t.detach(), 0).requires_grad_() for t in whole]
    expected = attention(*whole, hidden)
    mask = None if mask is None else own(mask, 2)
    right = None if mask is not None or flags else bytes_of(communication, RANKS, BATCH)
    with sends(right):
        output = layer(*parts, mask)
        check(output, parts, expected, whole, lambda t: own(t, 0))


def compare_sink(communication) -> None:
    """Each rank adds to the gradient of a learned offset what its tokens, or its heads, say (since 0.15)."""
    layer = layer_of("causal", communication, {"softmax_type": "learnable"}, {})
    whole = tensors(BATCH)
    sink = layer.softmax_offset
    with torch.no_grad():
        sink.copy_(torch.randn_like(sink))
    parts = [own(t.detach(), 0).requires_grad_() for t in whole]
    expected = attention(*whole, FUTURE, sink)
    output = layer(*parts, None)
    check(output, parts, expected, whole, lambda t: own(t, 0))
    (of_part,) = torch.autograd.grad(layer(*parts, None).square().sum(), sink)
    dist.all_reduce(of_part)
    torch.testing.assert_close(of_part, torch.autograd.grad(expected.square().sum(), sink)[0])


# name: (type of mask, boundaries of the documents for two ranks, the same without padding, our flags)
PACKED = {
    "documents": ("padding_causal", [0, 4, 4, 16], None, {}),
    "documents, both directions": ("padding", [0, 12, 16], None, {}),
    "padded documents": ("padding_causal", [0, 8, 16], [0, 6, 11], {}),
    "padded documents, both directions": ("padding", [0, 8, 16], [0, 6, 11], {}),
    "a window": ("padding_causal", [0, 4, 16], None, {"pre_tokens": 2, "next_tokens": 0}),
}


def compare_packed(communication, kind, bounds, unpadded, flags) -> None:
    starts, ends = (torch.tensor(each) * RANKS // 2 for each in (bounds, unpadded or bounds))
    params = PackedSeqParams("thd", ends, ends, starts if unpadded else None, starts if unpadded else None)
    document = torch.bucketize(column, starts, right=True) - 1
    real = column < starts[document] + (ends[1:] - ends[:-1])[document]  # no padding
    hidden = (document[:, None] != document) | ~real
    if kind == "padding_causal":
        hidden = hidden | (column > row) | (column < row - flags.get("pre_tokens", LENGTH))
    batch = {"tokens": column[None].clone()}
    if hasattr(utils, "get_thd_batch_on_this_cp_rank"):  # 0.16, 0.17
        mine, _ = utils.get_thd_batch_on_this_cp_rank(batch, ends, starts, torch.tensor([LENGTH]))
        index = mine["tokens"][0]
    else:  # the same tokens, by ours
        index = token_indices(starts.tolist(), RANKS, dist.get_rank()).to(column.device)
    whole = tensors(1)
    layer = layer_of(kind, communication, {}, flags)
    parts = [t.detach()[index].requires_grad_() for t in whole]
    output = layer(*(t.squeeze(1) for t in parts), None, packed_seq_params=params).unsqueeze(1)
    counted = real[:, None, None]  # what becomes of padding nobody reads
    expected = attention(*whole, hidden) * counted
    check(output * counted[index], parts, expected, whole, lambda t: t[index])


def compare_whole() -> None:
    """A batch that says that each rank has it whole (0.16) is not cut, whatever the configuration says."""
    ends = torch.tensor([0, 4, LENGTH], dtype=torch.int32)
    params = PackedSeqParams("thd", ends, ends, local_cp_size=1)
    document = column >= 4
    hidden = (document[:, None] != document) | (column > row)
    whole = tensors(1)
    output = layer_of("padding_causal", "p2p", {}, {})(
        *(t.squeeze(1) for t in whole), None, packed_seq_params=params
    )
    check(output.unsqueeze(1), whole, attention(*whole, hidden), whole, lambda t: t)


def compare_group(size: int) -> None:
    """A sequence that upstream has cut over some of the ranks is whole (--hybrid-context-parallel, 0.16)."""
    whole = tensors(1)
    batch = {"tokens": column.to(whole[0].device)}
    mine, params = utils.get_batch_on_this_hybrid_cp_rank(batch, size)
    index = mine["tokens"][0]
    assert index.numel() == LENGTH // size
    parts = [t.detach()[index].requires_grad_() for t in whole]
    layer, expected = (
        layer_of("causal", "p2p", {"hybrid_context_parallel": True}, {}),
        attention(*whole, FUTURE[:1]),
    )
    with sends(bytes_of("p2p", size, 1)):
        output = layer(*parts, None, packed_seq_params=params)
        check(output, parts, expected, whole, lambda t: t[index])


def say(line: str) -> None:
    """Write a line in one piece: the ranks share the pipe, and theirs would come between its words."""
    if dist.get_rank() == 0:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def main() -> None:
    dist.init_process_group("nccl")
    dynamic = "hybrid_context_parallel" in TransformerConfig.__dataclass_fields__  # since 0.16
    parallel_state.initialize_model_parallel(
        context_parallel_size=RANKS,
        hierarchical_context_parallel_sizes=HIERARCHY,
        **({"hybrid_context_parallel": True} if dynamic else {}),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for communication in COMMUNICATION:
        for name, case in CASES.items():
            dispatch.fallbacks.clear()
            compare(communication, *case)
            gathered = [reason for _, reason in dispatch.fallbacks]
            reported = communication in RINGS and name in NO_RING
            assert gathered == ["the data loader passes a mask"] * reported
            say(f"equal: {communication} {name}")
        if "softmax_type" in TransformerConfig.__dataclass_fields__:  # since 0.15
            compare_sink(communication)
        for name, case in PACKED.items():
            dispatch.fallbacks.clear()
            compare_packed(communication, *case)
            assert not dispatch.fallbacks
            say(f"equal: {communication} packed {name}")
    if "local_cp_size" in PackedSeqParams.__dataclass_fields__:
        compare_whole()
    if dynamic and hasattr(utils, "get_batch_on_this_hybrid_cp_rank"):  # moved in 0.19
        for size in (size for size in (1, 2, 4, 8) if size <= RANKS):
            compare_group(size)


if __name__ == "__main__":
    main()
