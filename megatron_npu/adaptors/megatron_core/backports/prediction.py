"""Patch ``megatron.core.transformer.multi_token_prediction`` to average losses over the tokens of a global
batch.

The loss of an additional token covers fewer tokens than the main loss: the last tokens of each sequence have
no such successor, and the mask is shifted accordingly. A loss divided by the tokens of one micro-batch on one
rank weights micro-batches equally, not tokens. The schedules below therefore read the masks of all
micro-batches before the first one is computed, so that each loss can be divided by its own tokens of the
global batch.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.decorators import own_backport

_PREDICTION = "megatron.core.transformer.multi_token_prediction"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_HELPER = f"{_PREDICTION}:MTPLossLoggingHelper"
# Of the tracker; ``prediction_losses`` reads the first.
_TOKENS, _TIMES = "megatron_npu_tokens", "megatron_npu_times"


class Counts(NamedTuple):
    """Counts of the tokens in a global batch that contribute to the main loss and to the loss of each
    additional token.
    """

    main: Tensor
    further: Sequence[Tensor]


class Count(NamedTuple):
    """The number of tokens in a mask, and the number that is reported to callers."""

    own: Tensor
    told: Tensor


_ahead: ContextVar[Counts | None] = ContextVar("ahead", default=None)
_told: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("told", default=None)
_last: ContextVar[Count | None] = ContextVar("last", default=None)

# --- the gradient ---------------------------------------------------------------------------------------

_weighed = functools.partial(
    own_backport,
    versions=">=0.17",
    until="not fixed up to 0.19.2, #7452/3",
    why="the gradient of an additional predicted token (--mtp-num-layers) is weighted by the number of "
    "tokens in one rank's micro batch: with --calculate-per-token-loss or context parallelism it "
    "depends on the micro batch size and the layout, if the number of valid tokens varies",
)


@_weighed(f"{_PREDICTION}:process_mtp_loss")
def weigh_tokens(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Divide each loss by its token count in the global batch, and multiply it by the token count of the main
    loss.

    In the end, every gradient is divided by the latter. If the tokens were not counted (the model is not run
    by a megatron-core schedule, or sequences are packed), the loss stays a sum and is divided by the main
    loss's tokens, as up to 0.16. Without --calculate-per-token-loss, it is divided by its tokens of the
    micro-batch on all context-parallel ranks.
    """
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    values = given.arguments
    config, parts = values["config"], values["cp_group"]
    whole = parts is None or parts.size() == 1
    if values["labels"] is None or (whole and not config.calculate_per_token_loss):
        return original(*args, **kwargs)
    mask = values["loss_mask"]
    values["loss_mask"] = torch.ones_like(values["labels"]).float() if mask is None else mask.float()
    if config.calculate_per_token_loss:
        one = torch.ones((), device=values["loss_mask"].device)
        factor, further = _ahead.get() or Counts(one, [one] * config.mtp_num_layers)
        rest = iter(further)
        reset = _told.set(lambda _: next(rest))
    else:
        factor = parts.size()  # gradients are averaged over the parts in the end
        reset = _told.set(functools.partial(_of_all_parts, group=parts))
    values["config"] = copy.copy(config)
    values["config"].calculate_per_token_loss = False  # divides by what roll_tensor tells
    values["config"].mtp_loss_scaling_factor = config.mtp_loss_scaling_factor * factor
    try:
        return original(*given.args, **given.kwargs)
    finally:
        _told.reset(reset)


def _of_all_parts(own: Tensor, group: Any) -> Tensor:
    total = own.clone()
    dist.all_reduce(total, group=group)
    return total


def _look_ahead(
    original: Callable[..., Any],
    *,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    forward_only: bool = False,
    **kwargs: Any,
) -> Any:
    """Count the tokens of all micro-batches, and then run the micro-batches."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    config = get_model_config(model[0] if isinstance(model, list) else model)
    counts = None
    if (
        config.calculate_per_token_loss
        and getattr(config, "mtp_num_layers", None)
        and not forward_only
        and parallel_state.is_initialized()
        and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    ):
        counts, data_iterator = _counted(data_iterator, num_microbatches, seq_length, config.mtp_num_layers)
    reset = _ahead.set(counts)
    try:
        return original(
            data_iterator=data_iterator,
            model=model,
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            forward_only=forward_only,
            **kwargs,
        )
    finally:
        _ahead.reset(reset)


for _name in ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving"):
    _weighed(f"{_SCHEDULES}:forward_backward_{_name}", order=1)(_look_ahead)


def _counted(source: Any, number: int, seq_length: int, depths: int) -> tuple[Counts | None, Any]:
    """Return the token counts of a global batch, and an iterator that yields the same micro-batches again.

    This is a collective of the last pipeline stage. Tensor- and context-parallel ranks may count the same
    tokens, because only ratios of the counts are used.
    """
    from megatron.core import parallel_state

    chunks = list(source) if isinstance(source, list) else [source]
    own = torch.zeros(1 + depths, dtype=torch.float64)
    if chunks[-1] is not None:
        batches = [next(chunks[-1]) for _ in range(number)]
        for batch in batches:
            own += _tokens(batch, seq_length, depths)
        chunks[-1] = iter(batches)
    total = own.float().to(devices.current().torch_device())
    dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    main, *further = total
    counts = Counts(main, further) if main.item() else None
    return counts, chunks if isinstance(source, list) else chunks[0]


def _tokens(batch: Any, seq_length: int, depths: int) -> Tensor:
    """Return how many tokens of a micro-batch count for each loss, ``[1 + depths]``.

    Unknown counts are 0.
    """
    found = torch.zeros(1 + depths, dtype=torch.float64)
    mask = batch.get("loss_mask") if isinstance(batch, Mapping) else None
    if mask is None or "cu_seqlens" in batch:
        return found
    if mask.size(-1) == seq_length:
        parts = [mask[..., depth:].sum() for depth in range(1 + depths)]
    else:  # this context-parallel rank's part
        parts = [mask.sum(), *_rolled(mask, depths)]
    return torch.stack([part.double().cpu() for part in parts])


def _rolled(mask: Tensor, depths: int) -> Iterator[Tensor]:
    from megatron.core import parallel_state

    roll = importlib.import_module(_PREDICTION).roll_tensor
    for _ in range(depths):
        mask, count = roll(mask, shifts=-1, dims=-1, cp_group=parallel_state.get_context_parallel_group())
        yield count


# --- the log --------------------------------------------------------------------------------------------

_logged = functools.partial(
    own_backport,
    until="not fixed up to 0.19.2, #7452/3",
    why="the logged losses of --mtp-num-layers are means of the means of each rank's micro batches: they "
    "depend on the micro batch size and the layout, if the number of valid tokens varies",
)


@_logged(f"{_PREDICTION}:roll_tensor")
def note_tokens(
    original: Callable[..., tuple[Tensor, Tensor | None]], tensor: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Record the number of tokens in a mask.

    Return the number in the global batch if ``weigh_tokens`` has computed it.
    """
    rolled, count = original(tensor, *args, **kwargs)
    if count is None:  # since 0.20, of what is no mask
        return rolled, count
    told = _told.get()
    expected = told(count) if told is not None and tensor.is_floating_point() else count
    _last.set(Count(count, expected))
    return rolled, expected


@_logged(f"{_HELPER}.save_loss_to_tracker", versions="<0.19")
@_logged(f"{_HELPER}.save_metrics_to_tracker", versions=">=0.19")
def save_sum(original: Callable[..., None], loss: Tensor, *args: Any, **kwargs: Any) -> None:
    """Save the sum of the losses, and the number of tokens that contribute to it."""
    layer = inspect.signature(original).bind(loss, *args, **kwargs).arguments["layer_number"]
    last = _last.get()
    if layer is None or last is None:
        return original(loss, *args, **kwargs)
    own, told = last
    total = torch.where(own > 0, loss.detach() * told.clamp(min=1), torch.zeros_like(loss))
    original(total, *args, **kwargs)
    tracker = _tracker()
    values = _values(tracker)
    tokens = tracker.setdefault(_TOKENS, torch.zeros_like(values))
    tokens[layer] += own
    tracker[_TIMES] = tracker.get(_TIMES, 0) + (layer == 0)


@_logged(f"{_HELPER}.track_mtp_metrics")
def log_means_of_tokens(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Replace the sums of losses in the log with means over the tokens of all micro-batches and ranks."""
    from megatron.core import parallel_state

    tracker = _tracker()
    if _TOKENS in tracker:
        values, tokens = _values(tracker), tracker[_TOKENS]
        both = torch.stack([values, tokens])
        dist.all_reduce(both, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        # the log divides by the number of micro-batches
        values.copy_(both[0] / both[1].clamp(min=1) * tracker.pop(_TIMES, 1))
        del tracker[_TOKENS]
    original(*args, **kwargs)


def _tracker() -> dict[str, Any]:
    return importlib.import_module(_PREDICTION).MTPLossLoggingHelper.tracker


def _values(tracker: Mapping[str, Any]) -> Tensor:
    return tracker["loss_values" if "loss_values" in tracker else "values"]  # 0.19 has renamed them
