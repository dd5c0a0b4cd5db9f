"""Implement mixed precision: matmuls in 16 bits, weights in fp32, and a loss scale for fp16."""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

SMALLEST = 1.0  # loss scale, as Megatron's --min-loss-scale; a gradient that overflows with it always does
_DTYPES = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(mixed_precision: str | None) -> torch.dtype:
    """Return the dtype in which matmuls are computed."""
    return _DTYPES[mixed_precision]


def autocast(device: torch.device, mixed_precision: str | None) -> contextlib.AbstractContextManager[Any]:
    """Return the context for a forward pass: torch's autocast, or no context in fp32."""
    if mixed_precision is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype_of(mixed_precision))


@dataclass
class LossScale:
    """A loss scale that keeps fp16 gradients representable (Micikevicius et al. 2018, 3.2).

    The rule is that of ``torch.amp.GradScaler``, which, however, checks only one rank's gradients for inf and
    has no minimum scale. Here, overflows are detected from the gradient norm over all ranks, which is
    computed in each step anyway.

    Attributes:
        value: the factor.
        steps: number of consecutive steps without overflow.
        growth, backoff: the factors applied to ``value`` after ``interval`` steps without overflow and after
            an overflow, respectively.
    """

    value: float = 65536.0
    steps: int = 0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the loss scale, for use in the backward pass."""
        return loss.float() * self.value

    def update(self, norm: float) -> bool:
        """Record the gradient norm of a step, and adjust the loss scale.

        Return True if the step overflowed.
        """
        if not math.isfinite(norm):
            self.value, self.steps = max(self.value * self.backoff, SMALLEST), 0
            return True
        self.steps += 1
        if self.steps == self.interval:
            self.value, self.steps = self.value * self.growth, 0
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` has returned."""
        for name, value in state.items():
            setattr(self, name, value)
