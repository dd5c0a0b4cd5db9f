"""Detect NaN values and loss spikes, and format the messages about them."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from megatron_npu.base import settings
from megatron_npu.ops import verify

REMEMBERED = 100  # losses that a new one is compared with
ENOUGH = 20  # without so many nothing is compared
FAR = 8.0  # times the usual distance from the median (median absolute deviation, as of a normal distribution)
LEAST = 0.02  # of the median: less than this is never unusual
_NORMAL = 1.4826  # median absolute deviation -> standard deviation


class DivergedError(RuntimeError):
    """Raised when the gradient or loss is NaN or infinite, because continuing would damage the weights."""


class Spikes:
    """Detects loss spikes by comparing each loss with the previous losses.

    The caller decides how to react.
    """

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=REMEMBERED)

    def note(self, last: int, losses: Sequence[float]) -> str | None:
        """Add the losses of all iterations up to the given one, and return a log line if one of them is a
        spike.

        Args:
            last: number of the last of these iterations.
            losses: losses in nats per token.
        """
        found = None
        for number, loss in enumerate(losses, last - len(losses) + 1):
            found = found or self.leap(number, loss)
            self.take(loss)
        return found

    def take(self, loss: float) -> None:
        """Add the loss of a valid iteration to the history.

        Losses that are not finite are ignored.
        """
        if math.isfinite(loss):
            self._usual.append(loss)

    def leap(self, number: int, loss: float) -> str | None:
        """Return a log line if the loss of an iteration is a spike, without adding the loss to the
        history.
        """
        if not math.isfinite(loss) or not self._leaps(loss):
            return None
        usual = statistics.median(self._usual)
        return f"loss spike at iteration {number}: {loss:.4f}, after a median of {usual:.4f}"

    def _leaps(self, loss: float) -> bool:
        if len(self._usual) < ENOUGH:
            return False
        middle = statistics.median(self._usual)
        distance = _NORMAL * statistics.median(abs(each - middle) for each in self._usual)
        return loss - middle > max(FAR * distance, LEAST * abs(middle))


class FirstNonFinite:
    """Detects the first module in a step whose output is not finite.

    The search is enabled only in verify mode, because each check synchronizes the device.
    """

    def __init__(self) -> None:
        self.watches = bool(settings.verified_operations())
        if self.watches:
            verify.follow_modules()

    def forget(self) -> None:
        """Reset the detector at the start of a step."""
        verify.forget_bad_output()

    def words(self) -> str:
        """Return a sentence that names the first module with a non-finite output."""
        if not self.watches:
            return f"Set {settings.VERIFY.name}=all to find the first module whose output is not finite."
        if (where := verify.first_bad_output()) is None:
            return (
                "Every output on this rank was finite: the problem is in the backward pass, or on "
                "another rank."
            )
        return f"The first non-finite output comes from {where}."
