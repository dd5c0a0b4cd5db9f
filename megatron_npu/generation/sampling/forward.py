"""Compute next-token logits for a batch of texts, over all pipeline stages and ranks of a model.

There are three implementations. The first one uses a KV cache and is fast. The second one works without a
cache (``--recompute``). The third one processes whole texts as in training, and is used for models whose
sequence is partitioned over ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu import devices
from megatron_npu.data.sequence_parts import part_of_this_rank


def forward_of(chunks: Sequence[Any], batch: int, longest: int, recompute: bool) -> Forward:
    """Return the forward implementation that suits the model's parallel layout.

    Args:
        chunks: this process's GPTModels, unwrapped and in order.
        batch: the number of texts in a batch.
        longest: the number of tokens in the longest text after generation.
        recompute: whether to recompute the whole text for every token instead of using a KV cache.
    """
    config = chunks[0].config
    if config.sequence_parallel or config.context_parallel_size > 1:
        return _Whole(chunks, batch, longest)
    return _Recomputed(chunks, batch, longest) if recompute else _Cached(chunks, batch, longest)


class Forward(ABC):
    """Base class of forward implementations, which compute the logits for the next token of each text.

    Args:
        chunks, batch, longest: see ``forward_of``.
    """

    def __init__(self, chunks: Sequence[Any], batch: int, longest: int) -> None:
        self.chunks, self.batch, self.longest = chunks, batch, longest
        self.device = devices.current().torch_device()

    @abstractmethod
    def logits(self, tokens: Tensor) -> Tensor | None:
        """Return the logits for the next token, ``[b, padded vocabulary]``, fp32 on the host.

        All ranks of the model must call this method. The call returns None on ranks that do not have the
        output layer.

        Args:
            tokens: [b, s], int64 on the host: the texts so far, from their first token. Each call after the
                first must add one token to the texts of the previous call.
        """


class _Cached(Forward):
    """Forward implementation with a key-value cache, which processes only new tokens.

    Past keys and values are kept in megatron-core's static context.
    """

    def __init__(self, chunks: Sequence[Any], batch: int, longest: int) -> None:
        super().__init__(chunks, batch, longest)
        self.context = self._new_context()

    def _new_context(self) -> Any:
        from megatron.core.inference.contexts import StaticInferenceContext

        return StaticInferenceContext(max_batch_size=self.batch, max_sequence_length=self.longest)

    def logits(self, tokens: Tensor) -> Tensor | None:
        past = self.context.sequence_len_offset
        new = tokens[:, past:].to(self.device)
        positions = torch.arange(past, tokens.size(1), device=self.device).expand_as(new)
        output = _through_stages(self.chunks, new, positions, tokens.size(1) - past, self.context)
        self.context.sequence_len_offset += new.size(1)  # 0.12 has no method for it
        return None if output is None else output[:, -1].float().cpu()


class _Recomputed(_Cached):
    """Forward implementation that recomputes the whole text for every token, starting from an empty
    context.
    """

    def logits(self, tokens: Tensor) -> Tensor | None:
        self.context = self._new_context()
        return super().logits(tokens)


class _Whole(Forward):
    """Forward implementation that processes whole texts as in training, padded to equal parts on all ranks.

    Padding does not influence the tokens before it, because attention is causal.
    """

    def logits(self, tokens: Tensor) -> Tensor | None:
        from megatron.core import parallel_state

        config = self.chunks[0].config
        cut = config.context_parallel_size
        multiple = config.tensor_model_parallel_size * (2 * cut if cut > 1 else 1)
        length = -(-tokens.size(1) // multiple) * multiple
        padded = torch.nn.functional.pad(tokens, (0, length - tokens.size(1))).to(self.device)
        positions = torch.arange(length, device=self.device).expand_as(padded)
        part = part_of_this_rank({"tokens": padded, "position_ids": positions})
        per_rank = length // cut
        if config.sequence_parallel:
            per_rank //= config.tensor_model_parallel_size
        output = _through_stages(self.chunks, part["tokens"], part["position_ids"], per_rank, None)
        if output is None:
            return None
        owner, place = _place(tokens.size(1) - 1, length, cut)
        last = output[:, place].float().contiguous()
        if cut > 1:
            group = parallel_state.get_context_parallel_group()
            dist.broadcast(last, dist.get_global_rank(group, owner), group=group)
        return last.cpu()


def whole_logits(chunks: Sequence[Any], tokens: Tensor) -> Tensor | None:
    """Return the logits of every token of a batch, ``[b, s, padded vocabulary]``, on the device.

    All ranks of the model must call this function. The call returns None on ranks that do not have the output
    layer. Models whose sequence is partitioned over ranks are not supported.

    Args:
        chunks: this process's GPTModels, unwrapped and in order.
        tokens: [b, s], int64 on the host; later tokens do not influence earlier ones.
    """
    inputs = tokens.to(devices.current().torch_device())
    positions = torch.arange(inputs.size(1), device=inputs.device).expand_as(inputs)
    return _through_stages(chunks, inputs, positions, inputs.size(1), None)


def _place(token: int, length: int, ranks: int) -> tuple[int, int]:
    """Return the context-parallel rank that stores a token, and the index of the token on that rank.

    The text is split into two parts per rank: rank r holds part r counted from the start, and part r counted
    from the end.
    """
    if ranks == 1:
        return 0, token
    size = length // (2 * ranks)
    part, place = divmod(token, size)
    return (part, place) if part < ranks else (2 * ranks - 1 - part, size + place)


def _through_stages(
    chunks: Sequence[Any], tokens: Tensor, positions: Tensor, per_rank: int, context: Any
) -> Tensor | None:
    """Run a batch through the model chunks of this process.

    Return the logits ``[b, s or 1, padded vocabulary]`` on the last stage, or None.

    Each chunk passes once through all pipeline stages before the next one, as in the interleaved schedule.

    Args:
        chunks: see ``forward_of``.
        tokens, positions: [b, s] on the device.
        per_rank: the number of tokens per text whose activations this rank holds between two stages.
        context: the inference context, or None.
    """
    output = None
    for gpt in chunks:
        if not gpt.pre_process:
            gpt.set_input_tensor(_received(gpt.config, per_rank, tokens.size(0)))
        output = gpt(tokens, positions, None, inference_context=context, runtime_gather_output=True)
        if not gpt.post_process:
            _send(output)
    return output if chunks[-1].post_process else None


def _received(config: Any, length: int, batch: int) -> Tensor:
    """Receive the previous stage's output ``[s, b, h]``."""
    from megatron.core import parallel_state

    kind = torch.float32 if config.fp32_residual_connection else config.params_dtype
    shape = length, batch, config.hidden_size
    buffer = torch.empty(shape, dtype=kind, device=devices.current().torch_device())
    before = parallel_state.get_pipeline_model_parallel_prev_rank()
    dist.recv(buffer, before, group=parallel_state.get_pipeline_model_parallel_group())
    return buffer


def _send(hidden: Tensor) -> None:
    """Send this stage's output ``[s, b, h]`` to the next stage."""
    from megatron.core import parallel_state

    after = parallel_state.get_pipeline_model_parallel_next_rank()
    dist.send(hidden.contiguous(), after, group=parallel_state.get_pipeline_model_parallel_group())
