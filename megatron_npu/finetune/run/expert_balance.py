"""Compute the balancing loss of Transformers' mixture-of-experts models over the tokens of a global batch.

With E experts, the loss is E * sum of f_e * P_e, where f_e is the fraction of choices of expert e and P_e is
its mean probability, over the tokens of a batch. Because this is a product of two means, it is not the mean
of the losses of the micro-batches. However, f_e has no gradient, so once the choices in the whole global
batch have been counted, each micro-batch contributes its part of P_e. If a rank has several micro-batches,
they are run through the model once more for this count, before the first backward pass.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

_NAME = "load_balancing_loss_func"  # of the modules of Transformers' mixtures
_TAKES = ("gate_logits", "num_experts", "top_k", "attention_mask")


class Sums(NamedTuple):
    """Components of the balancing loss, summed over the tokens in all layers.

    Attributes:
        chosen: the number of times each expert was chosen, [E].
        probabilities: sum of each expert's probabilities, [E].
        tokens: number of tokens.
    """

    chosen: Tensor
    probabilities: Tensor
    tokens: Tensor


def sums_of(layers: tuple[Tensor, ...], experts: int, top_k: int, mask: Tensor | None) -> Sums:
    """Return the components of the balancing loss, summed over the tokens of a batch.

    Args:
        layers: router logits of each layer, [b * s, E].
        experts: the number E of experts.
        top_k: the number of experts per token.
        mask: 0 for tokens that are not counted, [b, s]. If None, all tokens are counted.
    """
    weights = torch.ones_like(layers[0][:, 0]) if mask is None else mask.reshape(-1).to(layers[0])
    weights = weights.float()
    chosen = torch.zeros(experts, device=weights.device)
    probabilities = torch.zeros_like(chosen)
    for logits in layers:
        each = logits.to(weights.device).softmax(-1)
        choice = each.topk(top_k, dim=-1).indices
        chosen = chosen.scatter_add(0, choice.reshape(-1), weights.repeat_interleave(top_k))
        probabilities = probabilities + (each.float() * weights[:, None]).sum(0)
    return Sums(chosen, probabilities, len(layers) * weights.sum())


class ExpertBalance:
    """Replacement for the balancing loss of a mixture-of-experts model during training.

    Args:
        names: names in the module of the model.
        ranks: number of ranks that share the global batch.
    """

    def __init__(self, names: dict[str, Any], ranks: int) -> None:
        self._names, self._ranks = names, ranks
        self._divisor: Callable[[], float] | None = None  # None: nothing is trained on
        self._counted: Tensor | None = None  # choices [E] and tokens [1] of this rank; None: not counting
        self._whole: Tensor | None = None  # of all ranks

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Make the model call this object to compute its balancing loss.

        The loss is 0 outside a step.
        """
        own = self._names[_NAME]
        self._names[_NAME] = self._loss
        try:
            yield
        finally:
            self._names[_NAME] = own

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the selected experts in all micro-batches of a global batch."""
        self._counted = torch.zeros(1)
        try:
            yield
            self._whole = self._of_all_ranks(self._counted)
        finally:
            self._counted = None

    @contextlib.contextmanager
    def step(self, divisor: Callable[[], float]) -> Iterator[None]:
        """Provide the balancing loss of a global batch to the model inside the ``with`` block.

        Without a preceding ``counting``, the global batch has one micro-batch per rank.

        Args:
            divisor: returns the divisor of the current micro-batch's loss.
        """
        self._divisor = divisor
        try:
            yield
        finally:
            self._divisor = self._whole = None

    def _loss(
        self,
        gate_logits: Any,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor | int:
        """Return the micro-batch's share of the loss, multiplied by the number by which the trainer later
        divides it.

        Outside a step, return 0.
        """
        if not isinstance(gate_logits, tuple):
            return 0  # as Transformers' own
        nothing = gate_logits[0].new_zeros((), dtype=torch.float32)
        if self._divisor is None and self._counted is None:
            return nothing
        experts = gate_logits[0].shape[-1] if num_experts is None else num_experts
        sums = sums_of(gate_logits, experts, top_k, attention_mask)
        own = torch.cat([sums.chosen, sums.tokens[None]]).detach()
        if self._counted is not None:
            self._counted = self._counted.to(own) + own
            return nothing
        if self._whole is None:
            self._whole = self._of_all_ranks(own)
        assert self._divisor is not None
        factor = self._divisor() * self._ranks
        if math.isinf(factor):  # nothing of this micro-batch counts
            return nothing
        *_, tokens = self._whole
        shares = self._whole[:-1] / tokens
        return (shares * sums.probabilities).sum() * (experts * factor / tokens)

    def _of_all_ranks(self, own: Tensor) -> Tensor:
        together = own.clone()
        if self._ranks > 1:
            dist.all_reduce(together)
        return together


def asked_for(model: nn.Module) -> bool:
    """Return True if the configuration of a Transformers model enables a balancing loss."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "output_router_logits", False))


def of(model: nn.Module, ranks: int) -> ExpertBalance | None:
    """Return the replacement for a model's balancing loss, or None if the model has no supported
    balancing loss.
    """
    own: Any = model
    if hasattr(own, "get_base_model"):  # of peft's adapters
        own = own.get_base_model()
    names = getattr(inspect.unwrap(type(own).forward), "__globals__", {})
    function = names.get(_NAME)
    if not asked_for(own) or function is None or tuple(inspect.signature(function).parameters) != _TAKES:
        return None
    return ExpertBalance(names, ranks)
