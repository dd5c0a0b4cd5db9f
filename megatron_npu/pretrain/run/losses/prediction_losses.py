"""Collect the losses of multi-token prediction for the log.

megatron-core itself adds their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_npu import devices

PREFIX = "mtp_"  # of the losses' names
# Of megatron-core's tracker: what adaptors add to its sums (0.19 renamed those).
TOKENS = "megatron_npu_tokens"


@dataclass(frozen=True)
class PredictionLosses:
    """The multi-token prediction losses of a run.

    Attributes:
        further: number of additional tokens that are predicted.
    """

    further: int

    @property
    def names(self) -> list[str]:
        """The names that upstream gives to the losses, one for each additional token."""
        return [f"{PREFIX}{number}_loss" for number in range(1, self.further + 1)]

    def take(self) -> dict[str, float]:
        """Return the unweighted mean of each loss over the tokens since the last call, in nats per token.

        A collective: all ranks must call it.
        """
        if not self.further:
            return {}
        own = torch.zeros(2, self.further, dtype=torch.float32, device=devices.current().torch_device())
        for row, values in zip(own, _tracked(), strict=False):
            row += values
            values.zero_()
        dist.all_reduce(own)  # stages before the last have none; all tensor-parallel ranks have the same
        losses, tokens = own
        return dict(zip(self.names, (losses / tokens).tolist(), strict=True))

    def forget(self) -> None:
        """Discard values from an earlier run in this process, which may have had another number of layers."""
        if self.further:
            _tracker().clear()


def _tracked() -> list[torch.Tensor]:
    """Return the loss sums and the token counts of this process.

    Both are empty on all stages but the last.
    """
    tracker = _tracker()
    return [tracker[name] for name in ("values", "loss_values", TOKENS) if name in tracker]


def _tracker() -> dict[str, Any]:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    return MTPLossLoggingHelper.tracker
