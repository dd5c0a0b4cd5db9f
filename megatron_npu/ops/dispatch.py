"""How an operation finds its implementation: one contract, one reference, one binding per device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megatron_npu import devices, settings

logger = logging.getLogger(__name__)

Implementation = Callable[..., Any]
Supports = Callable[..., str | None]


class FusedPathRefusedError(RuntimeError):
    """A call left its fused path although ``MEGATRON_NPU_STRICT=1`` forbids it."""


OPERATIONS: list[Operation] = []


class Operation:
    """An operation: its name, its plain-torch reference and the implementations of the devices.

    Calling it runs the implementation of this process's device, bound at the first call. Where that
    implementation refuses the call (``supports`` returns a reason), the reference runs and the reason
    is reported once; in strict mode it is an error.
    """

    def __init__(self, name: str, reference: Implementation) -> None:
        self.name = name
        self.reference = reference
        self.implementations: dict[str, tuple[Implementation, Supports | None]] = {}
        self._bound: tuple[Implementation, Supports | None] | None = None
        OPERATIONS.append(self)

    def on(self, *names: str, supports: Supports | None = None) -> Callable[[Implementation], Implementation]:
        """Register the decorated function as the implementation for the named devices."""

        def register(function: Implementation) -> Implementation:
            for name in names:
                self.implementations[name] = (function, supports)
            return function

        return register

    def bind(self, device: str) -> None:
        """Use the implementation of ``device`` from now on (the reference where there is none)."""
        self._bound = self.implementations.get(device, (self.reference, None))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._bound is None:
            self.bind(devices.current().name)
        function, supports = self._bound
        reason = supports(*args, **kwargs) if supports is not None else None
        if reason is None:
            return function(*args, **kwargs)
        report_refusal(self.name, reason)
        return self.reference(*args, **kwargs)


# What leaves a fused path, and how often: {(operation, reason): calls}.
refusals: dict[tuple[str, str], int] = {}


def report_refusal(operation: str, reason: str) -> None:
    """Count a call that runs on the reference; log its reason the first time.

    Raises:
        FusedPathRefusedError: in strict mode.
    """
    if settings.STRICT.enabled():
        raise FusedPathRefusedError(f"{operation} leaves its fused path: {reason} ({settings.STRICT.name}=1)")
    seen = refusals.get((operation, reason), 0)
    refusals[operation, reason] = seen + 1
    if not seen:
        logger.warning("%s runs unfused: %s", operation, reason)
