"""Compute the loss of one micro-batch in one process, and its mean over all processes."""

from __future__ import annotations

import torch
import torch.distributed as dist


def masked_sum(
    mask: torch.Tensor, output: torch.Tensor, of_all_parts: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum of the losses, the number of tokens (int32), and both values for the log, ``[2]`` fp32.

    megatron-core divides by the number of tokens: those of this process's part of the micro batch, or those
    of the whole batch with --calculate-per-token-loss. Without that flag, gradients would be counted once per
    context-parallel rank.

    Args:
        mask: [b, s], 1 for tokens that count, otherwise 0.
        output: [b, s], the loss of each token in nats.
        of_all_parts: whether to return the number of tokens of all context-parallel ranks.
    """
    mask = mask.view(-1).float()
    loss = torch.dot(output.view(-1).float(), mask)
    tokens = mask.sum()
    # stack copies: megatron-core divides the loss in place
    logged = torch.stack([loss.detach(), tokens])
    if of_all_parts:
        from megatron.core import parallel_state

        dist.all_reduce(tokens, group=parallel_state.get_context_parallel_group())
    return loss, tokens.to(torch.int), logged


def means(sums: torch.Tensor) -> list[float]:
    """Return the mean loss of each iteration over the tokens of all processes, in nats per token.

    A collective: all ranks must call it and get the same result.

    Args:
        sums: [iterations, 2], this process's sum of losses and number of tokens; values of pipeline stages
            before the last are ignored.
    """
    from megatron.core import parallel_state

    total = sums.clone()
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            total,
            parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    losses, tokens = total.cpu().double().unbind(1)
    return (losses / tokens).tolist()


def of_ranks(sums: torch.Tensor) -> dict[int, float]:
    """Return each rank's mean loss over its own tokens, averaged over the iterations, in nats per token.

    Ranks that do not compute a loss are left out: those of pipeline stages before the last, and all
    tensor-parallel ranks except the first. A collective: all ranks must call it.

    Args:
        sums: [iterations, 2], this process's sum of losses and number of tokens.
    """
    from megatron.core import parallel_state

    counts = (
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )
    own = sums * counts
    each = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(each, own)
    losses, tokens = torch.stack(each).cpu().double().unbind(-1)
    counted = (rank for rank, total in enumerate(tokens.sum(1)) if total)
    return {rank: (losses[rank] / tokens[rank]).mean().item() for rank in counted}
