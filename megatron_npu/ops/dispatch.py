"""Select the implementation of an operation for the current device.

Each operation has one contract, one reference, and one implementation per device.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_npu import devices
from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError
from megatron_npu.ops import triton, verify

logger = logging.getLogger(__name__)

Implementation = Callable[..., Any]
Supports = Callable[..., str | None]
# Makes a random leaf tensor of a shape, on the device and in the dtype that are tested.
Make = Callable[..., Tensor]
Example = Callable[[Make], Tensor | None]

# What the float kernels of torch_npu 2.13 take, unless their documentation says otherwise.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Unsupported(NamedTuple):
    """The result of planning a call that the device's implementation does not support, with the reason."""

    reason: str


Plan = Callable[..., Any | Unsupported]


class Registered(NamedTuple):
    """The implementation of an operation for one device.

    Attributes:
        function: the implementation.
        supports, plan: the check before each call; at most one of the two is set.
        note: the kernels that the function uses, for the table in docs/reference/operations.md.
        limits: the calls that ``supports`` accepts, for the same table.
    """

    function: Implementation
    supports: Supports | None
    plan: Plan | None
    note: str
    limits: str


class FallbackForbiddenError(UsageError):
    """Raised when an operation falls back although ``MEGATRON_NPU_STRICT=1`` forbids it."""


OPERATIONS: list[Operation] = []


class Operation:
    """An operation with its name, its plain-torch reference and its implementations for devices.

    A call runs the implementation for this process's device, which is bound at the first call. If that
    implementation does not support the call (``supports`` returns a reason, or ``plan`` an ``Unsupported``),
    the reference runs and the reason is logged once; in strict mode, this raises an error. With
    ``MEGATRON_NPU_VERIFY``, each result is compared with the reference; without it, the implementation is
    called directly.

    Args:
        name: the name that reports show.
        reference: the same operation in plain torch; it accepts any float dtype and computes in fp32 or
            better.
        group: the name for ``MEGATRON_NPU_VERIFY``, if it is not ``name``.
        draws: given the arguments of a call, returns whether the call draws random numbers, so that the
            reference cannot reproduce it.
        rounds_within: whether intermediate results have the dtype of the inputs, so that a wider output is no
            more precise than the inputs.
    """

    def __init__(
        self,
        name: str,
        reference: Implementation,
        *,
        group: str | None = None,
        draws: Callable[..., bool] | None = None,
        rounds_within: bool = False,
    ) -> None:
        self.name = name
        self.group = group or name
        self.draws = draws
        self.rounds_within = rounds_within
        self.reference = reference
        self.implementations: dict[str, Registered] = {}
        self.examples: dict[str, Example] = {}
        self._bound: Implementation = self._bind_and_call
        OPERATIONS.append(self)

    def on(
        self,
        *names: str,
        supports: Supports | None = None,
        plan: Plan | None = None,
        note: str = "",
        limits: str = "",
    ) -> Callable[[Implementation], Implementation]:
        """Register the decorated function as the implementation for the named devices.

        Args:
            names: the devices.
            supports: given the arguments of a call, returns the reason why the function does not support it,
                or None.
            plan: instead of ``supports``, if the check also decides how to make the call: returns
                ``Unsupported``, or anything else, which is passed to the function as ``plan``.
            note: the kernels that the function uses, for the table in docs/reference/operations.md; Markdown.
            limits: the calls that ``supports`` accepts, for the same table; Markdown.
        """

        def register(function: Implementation) -> Implementation:
            for name in names:
                self.implementations[name] = Registered(function, supports, plan, note, limits)
            return function

        return register

    def example(self, case: str = "") -> Callable[[Example], Example]:
        """Register the decorated function as a small example call, which ``megatron-npu doctor`` verifies.

        The function receives a helper that creates a random leaf tensor of a given shape, and returns the
        tensor to differentiate, or None. ``case`` names one of several examples for an operation.
        """

        def register(function: Example) -> Example:
            self.examples[case] = function
            return function

        return register

    def bind(self, device: str) -> None:
        """Select the implementation for ``device`` for all later calls.

        If a device has no implementation, the reference is used, which is logged as a fallback.

        Raises:
            UsageError: ``MEGATRON_NPU_VERIFY`` names an operation that does not exist.
            FallbackForbiddenError: the device has no implementation, and strict mode is enabled.
        """
        if device not in self.implementations:
            report_fallback(self.name, f"there is no implementation for {device}")
            self._bound = self.reference
            return
        function, supports, plan, *_ = self.implementations[device]
        verified = verify.watches(self.name, self.group)
        if plan is not None:
            self._bound = functools.partial(self._planned, function, plan, verified)
            return
        function = self._verified(function) if verified else function
        self._bound = function if supports is None else functools.partial(self._guarded, function, supports)

    def unbind(self) -> None:
        """Forget the selected implementation, so that the next call selects one again."""
        self._bound = self._bind_and_call

    def _guarded(self, function: Implementation, supports: Supports, *args: Any, **kwargs: Any) -> Any:
        reason = supports(*args, **kwargs)
        if reason is None:
            return function(*args, **kwargs)
        report_fallback(self.name, reason)
        return self.reference(*args, **kwargs)

    def _planned(
        self, function: Implementation, plan: Plan, verified: bool, *args: Any, **kwargs: Any
    ) -> Any:
        planned = plan(*args, **kwargs)
        if isinstance(planned, Unsupported):
            report_fallback(self.name, planned.reason)
            return self.reference(*args, **kwargs)
        if verified:  # the reference takes no plan
            return self._verified(functools.partial(function, plan=planned))(*args, **kwargs)
        return function(*args, **kwargs, plan=planned)

    def _verified(self, function: Implementation) -> Implementation:
        return verify.with_reference(
            self.name, function, self.reference, self.draws, rounds_within=self.rounds_within
        )

    def _bind_and_call(self, *args: Any, **kwargs: Any) -> Any:
        self.bind(devices.current().name)
        return self._bound(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._bound(*args, **kwargs)


def all_operations() -> list[Operation]:
    """Import every module of ``ops``, and return all operations."""
    package = importlib.import_module("megatron_npu.ops")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if ".triton.kernels." not in module.name:  # they need triton, and no operation is there
            importlib.import_module(module.name)
    return [each for each in OPERATIONS if each.reference.__module__.startswith(f"{package.__name__}.")]


# What was not done as it was asked for, and how often: {(operation, reason): calls}.
fallbacks: dict[tuple[str, str], int] = {}


def report_fallback(operation: str, reason: str, does: str = "falls back", remedy: str = "") -> None:
    """Count a fallback to the reference, and log the reason the first time.

    Args:
        operation: the operation, or the requested option.
        reason: the reason why the operation is not performed as requested.
        does: what happens instead, as a predicate of ``operation``.
        remedy: what to change in strict mode; leaving strict mode is always suggested too.

    Raises:
        FallbackForbiddenError: strict mode is enabled.
    """
    if settings.STRICT.enabled():
        name = settings.STRICT.name
        raise FallbackForbiddenError(
            f"{operation} {does}: {reason}. {name}=1 forbids fallbacks. "
            + (f"{remedy.rstrip('.')}, or unset {name}." if remedy else f"Unset {name}.")
        )
    note_slower(operation, reason, does)


def takes_kernel(operation: str, *tensors: Tensor | None, beyond: str | None = None) -> bool:
    """Return True if one of our Triton kernels should compute a call on a GPU.

    Otherwise torch's kernels compute it.

    Both meet the operation's contract, so using torch is not a fallback that strict mode forbids. The reason
    for torch is logged once and counted in the ledger, except with ``MEGATRON_NPU_TRITON=0``, or while
    torch.compile, which fuses torch's kernels itself, is tracing.

    Args:
        operation: the operation's name.
        tensors: the kernel's inputs.
        beyond: a reason, apart from the tensors, why the kernel does not support the call, or None.
    """
    if triton.switched_off() or torch.compiler.is_compiling():
        return False
    reason = beyond or triton.refusal(*tensors)
    if reason is not None:
        note_slower(operation, reason, "runs on torch's kernels")
    return reason is None


def without_kernels() -> str | None:
    """Return the reason why our Triton kernels cannot run on a GPU, or None if they can run."""
    return triton.not_to_be_expected()


def note_slower(operation: str, reason: str, does: str) -> None:
    """Count a call that uses a slower implementation, and log the reason once.

    Strict mode allows this.
    """
    seen = fallbacks.get((operation, reason), 0)
    fallbacks[operation, reason] = seen + 1
    if not seen:
        logger.warning("%s %s: %s", operation, does, reason)


def unsupported_dtype(kernel: str, dtype: torch.dtype) -> str | None:
    """Return the reason why ``kernel`` does not support ``dtype``, or None if it does.

    Operations call this in ``supports``.
    """
    return None if dtype in KERNEL_DTYPES else f"{kernel} does not support {dtype}"
