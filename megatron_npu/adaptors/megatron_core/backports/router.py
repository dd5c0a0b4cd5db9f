"""Patch ``megatron.core.transformer.moe.router`` to correct the scale of auxiliary losses and the logged
z-loss.

With --calculate-per-token-loss, every gradient is divided by the number of tokens on all ranks, so an
auxiliary loss must be multiplied by the tokens of a micro-batch on all ranks of a tensor- and
context-parallel group. Upstream multiplies it by those of one rank (#5047), or of one sequence (#5798).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import backport

_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_scaled = partial(
    backport,
    until="0.19.0, #5047",
    why="with --calculate-per-token-loss and tensor parallelism, the gradients of the auxiliary losses and "
    "the z-loss are too small by a factor of the tensor- and context-parallel group's size",
)
_AUX, _Z = "moe_aux_loss_coeff", "moe_z_loss_coeff"


@_scaled(f"{_ROUTER}.attach_and_log_load_balancing_loss", versions=">=0.14,<0.19")
def attach_loss(
    original: Callable[..., Tensor],
    self: Any,
    activation: Tensor,
    aux_loss_coeff: float,
    aux_loss: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Scale the auxiliary loss, and also the coefficient by which upstream divides the loss before logging
    it.

    Args:
        original: upstream's function.
        self: the router.
        activation: [tokens, experts].
        aux_loss_coeff: the coefficient that the loss includes.
        aux_loss: a scalar.
        args, kwargs: passed on.

    Returns:
        ``activation``, whose gradient includes that of the loss.
    """
    size = _ranks(self) if self.calculate_per_token_loss else 1
    return original(self, activation, aux_loss_coeff * size, aux_loss * size, *args, **kwargs)


@_scaled(f"{_ROUTER}.apply_load_balancing_loss", versions="<0.14")
def apply_load_balancing_loss(
    original: Callable[..., Tensor], self: Any, *args: Any, **kwargs: Any
) -> Tensor:
    """Scale the coefficient of the load-balancing loss.

    The logged loss does not include the coefficient.
    """
    with _coefficient_times(self, _AUX, _ranks(self)):
        return original(self, *args, **kwargs)


@_scaled(f"{_ROUTER}.apply_z_loss", versions="<0.19")
def apply_z_loss(original: Callable[..., Tensor], self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Scale the coefficient of the z-loss.

    The logged loss does not include the coefficient.
    """
    with _coefficient_times(self, _Z, _ranks(self)):
        return original(self, *args, **kwargs)


@backport(
    f"{_ROUTER}._apply_seq_aux_loss",
    versions=">=0.16,<0.19",
    until="0.19.0, #5798",
    why="with --calculate-per-token-loss, the gradient of seq_aux_loss is too small by a factor of the "
    "micro batch size",
)
def apply_sequence_loss(
    original: Callable[..., Tensor],
    self: Any,
    probs: Tensor,
    scores_for_aux_loss: Tensor,
    routing_map: Tensor,
    seq_length: int,
    bsz: int,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Multiply the coefficient of the sequence loss by the number of sequences.

    Args:
        original: upstream's function.
        self: the router.
        probs, scores_for_aux_loss, routing_map: [tokens, experts].
        seq_length: number of tokens of a sequence on this rank.
        bsz: number of sequences in the micro-batch.
        args, kwargs: passed on.

    Returns:
        ``probs``, whose gradient includes that of the loss.
    """
    with _coefficient_times(self, _AUX, bsz):
        return original(self, probs, scores_for_aux_loss, routing_map, seq_length, bsz, *args, **kwargs)


_logged = partial(
    backport,
    f"{_ROUTER}.apply_z_loss",
    until="0.19.0, #3199",
    why="the logged z-loss is the first rank's instead of the mean over the tensor-parallel ranks, which "
    "have different tokens with sequence parallelism",
)


@_logged(versions=">=0.18,<0.19")
def log_z_loss(original: Callable[..., Tensor], self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Log the z-loss together with the group of ranks over which it is averaged."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    logits = original(self, *args, **kwargs)
    if "z_loss" in (metrics := get_moe_metrics_tracker().metrics):
        metrics["z_loss"].avg_group = self.tp_dp_cp_group
    return logits


@_logged(versions="<0.18")
def log_z_loss_in_a_table(original: Callable[..., Tensor], self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Log the z-loss, with the ranks over which it is averaged, in the nested dict that versions up to
    0.17 use.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    # in parallel_state up to 0.12
    holder = moe_utils if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker") else parallel_state
    logits = original(self, *args, **kwargs)
    if "z_loss" in (tracker := holder.get_moe_layer_wise_logging_tracker()):
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        tracker["z_loss"]["avg_group"] = group
    return logits


def _ranks(router: Any) -> int:
    """Return the number of ranks in the router's tensor- and context-parallel group, which exists since
    0.13.
    """
    if hasattr(router, "tp_cp_group"):
        return router.tp_cp_group.size()
    from megatron.core import parallel_state

    return parallel_state.get_tensor_and_context_parallel_world_size()


@contextlib.contextmanager
def _coefficient_times(router: Any, name: str, factor: int) -> Iterator[None]:
    """Multiply the coefficient ``name`` in the router's configuration by ``factor`` inside the ``with``
    block.

    Upstream divides the loss by the coefficient again when it writes the log. Without
    --calculate-per-token-loss, nothing changes.
    """
    config = router.config
    coefficient = getattr(config, name)
    if not router.calculate_per_token_loss or coefficient is None or factor == 1:
        yield
        return
    several = isinstance(coefficient, list)  # one for each kind of loss, since 0.14
    scaled = [each * factor for each in coefficient] if several else coefficient * factor
    router.config = copy.copy(config)  # other layers share it
    setattr(router.config, name, scaled)
    try:
        yield
    finally:
        router.config = config
