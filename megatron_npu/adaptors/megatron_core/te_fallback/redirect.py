"""Local layers for who asks for those of TransformerEngine where it is not installed; it is always said."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from megatron_npu.errors import UsageError
from megatron_npu.ops import dispatch

# Arguments that name kernels of TransformerEngine for what the local layers compute as well.
_KERNELS = ("use_te_op_fuser", "use_te_activation_func")


def report(asked: str) -> None:
    """Say that ``asked`` gives local layers.

    Raises:
        FallbackForbiddenError: in strict mode.
    """
    dispatch.report_fallback(
        "transformer_engine",
        f"not installed: {asked} gives the local layers",
        remedy="Give --transformer-impl local, or ask for the local layers' spec",
    )


def refuse_fp8(fp8: Any) -> None:
    """Raise UsageError if ``fp8`` asks for it."""
    if fp8:
        raise UsageError(
            f"fp8={fp8!r} without TransformerEngine",
            "a precision that the local layers have",
            "Leave fp8 out and train in bf16, or install TransformerEngine.",
        )


def without(flag: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrap that turns the argument ``flag`` of a function off, and says so.

    A function that is given a ``normalization`` for its local layers alone takes that of its ``config``.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def specify(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            arguments = given.arguments
            if not arguments[flag]:
                return original(*args, **kwargs)
            report(f"{original.__name__}({flag}=True)")
            refuse_fp8(arguments.get("fp8"))
            arguments |= {flag: False, **{name: False for name in _KERNELS if name in arguments}}
            if "normalization" in arguments and arguments["normalization"] is None:
                arguments["normalization"] = arguments["config"].normalization
            return original(*given.args, **given.kwargs)

        return specify

    return wrap


def instead(local: Callable[..., Any], **always: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrap that calls ``local`` for a function of TransformerEngine layers, and says so.

    Arguments that ``local`` does not have name kernels of TransformerEngine and are left out.

    Args:
        local: gets the original, and returns the function that takes its place; see ``named``.
        always: further arguments of the local function.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def specify(*args: Any, **kwargs: Any) -> Any:
            report(f"{original.__name__}()")
            given = signature.bind(*args, **kwargs).arguments
            refuse_fp8(given.pop("fp8", None))
            kept = {name: value for name, value in given.items() if name not in _KERNELS}
            return local(original)(**kept, **always)

        return specify

    return wrap


def named(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Return what finds ``name`` beside a function: in its module, as it is then."""
    return lambda original: vars(sys.modules[original.__module__])[name]
