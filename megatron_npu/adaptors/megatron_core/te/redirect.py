"""Return local layers when TransformerEngine's layers are requested, and log this."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.ops import dispatch

# Arguments that choose kernels of TransformerEngine for what the local layers compute as well.
_KERNELS = (
    "use_te_op_fuser",
    "use_te_activation_func",
    "mla_down_proj_fusion",  # since 0.17
    "use_grouped_gemm_for_dense_mlp",  # since 0.18
)
_LEGACY = "moe_use_legacy_grouped_gemm"  # 0.17 has no such experts, and its layers for inference the argument


def report(asked: str) -> None:
    """Log that local layers are returned instead of the requested ``asked``.

    Raises:
        FallbackForbiddenError: strict mode is enabled.
    """
    dispatch.report_fallback(
        "transformer_engine",
        f"it is not installed, so {asked} returns the local layers",
        remedy="Pass --transformer-impl local, or request the local layers' spec",
    )


def refuse_fp8(fp8: Any) -> None:
    """Check that ``fp8`` is not requested.

    Raises:
        UsageError: ``fp8`` is requested.
    """
    if fp8:
        raise UsageError(
            f"fp8={fp8!r} requires TransformerEngine, because the local layers do not support this "
            "precision. Remove fp8 and train in bf16, or install TransformerEngine."
        )


def force_flag_off(flag: str) -> Callable[..., Any]:
    """Return a function, to be recorded with ``around``, that sets the argument ``flag`` to False and logs
    this.

    If the original takes a ``normalization``, which only its local layers use, it gets that of its
    ``config``.
    """

    def specify(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs)
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


def redirect_to_local(local: str | Callable[..., Any], **always: Any) -> Callable[..., Any]:
    """Return a function, to be recorded with ``around``, that calls ``local`` instead of the original and
    logs this.

    Arguments that select TransformerEngine's kernels are removed, because ``local`` does not accept them.

    Args:
        local: the name of a function in the same module, or a function.
        always: additional arguments for the local function.
    """

    def specify(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        report(f"{original.__name__}()")
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        refuse_fp8(given.pop("fp8", None))
        function = sibling(original, local) if isinstance(local, str) else local
        if _LEGACY not in inspect.signature(function).parameters:
            given.pop(_LEGACY, None)
        kept = {name: value for name, value in given.items() if name not in _KERNELS}
        return function(**kept, **always)

    return specify


def sibling(original: Callable[..., Any], name: str) -> Any:
    """Return the current value of ``name`` in the module that defines ``original``."""
    return vars(sys.modules[original.__module__])[name]
