"""Support Muon and related optimizers.

Patches ``megatron.core.optimizer``, ``.muon`` and ``.layer_wise_optimizer``. 0.16 was written for
emerging_optimizers 0.1 and uses its names for two arguments.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, WITHOUT_CUDA, around, wrap
from megatron_npu.patching.patch import NotAsked

_LAYER_WISE = "megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer"
_PACKAGE = "emerging_optimizers"
_RENAMED = (
    "--optimizer muon and dist_muon of 0.16 raise a TypeError, because emerging_optimizers 0.2 renamed "
)


def names_fit() -> str | None:
    """Return the reason why the argument names of upstream need no change, or None if they need one.

    The reason is that the package is not installed, or is as old as megatron-core 0.16.
    """
    try:
        from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer
    except ImportError as error:  # upstream's module then has no such optimizer
        return NotAsked(str(error))
    known = inspect.signature(OrthogonalizedOptimizer.__init__).parameters
    return "emerging_optimizers is older than 0.2" if "use_nesterov" in known else None


@wrap(
    "megatron.core.optimizer.muon:TensorParallelMuon",
    versions=">=0.16,<0.17",
    condition=names_fit,
    why=f"{_RENAMED}the argument use_nesterov of its base class",
    until="0.17, which uses the new name",
)
def with_the_new_name(original: type) -> type:
    """Return the class with an additional base class that renames the argument."""

    base: Any = original.__bases__[0]

    class Renamed(base):
        def __init__(self, *args: Any, use_nesterov: bool, **kwargs: Any) -> None:
            super().__init__(*args, nesterov=use_nesterov, **kwargs)

    return type(original.__name__, (original, Renamed), {"__module__": original.__module__})


@around(
    "megatron.core.optimizer.muon:newton_schulz_tp",
    versions=">=0.16,<0.17",
    condition=names_fit,
    why=f"{_RENAMED}the argument mode of newton_schulz_tp",
    until="0.17, which uses the new name",
)
def newton_schulz(original: Callable[..., Tensor], x: Tensor, *, mode: str, **kwargs: Any) -> Tensor:
    """Orthogonalize a matrix ``[rows, columns]`` by Newton-Schulz iteration.

    ``mode`` is the argument that is now called ``tp_mode``.
    """
    return original(x, tp_mode=mode, **kwargs)


@around(
    f"{_LAYER_WISE}.allgather_params",
    versions=">=0.16",
    devices=("cpu",),
    why="Muon's ranks gather parts of different sizes, which NCCL and HCCL support but gloo does not",
)
def broadcast_params(original: Callable[..., None], self: Any) -> None:
    """Broadcast each rank's updated parameters with upstream's own function."""
    if self.pg_collection is not None:
        self.broadcast_params()


@around(
    f"{_LAYER_WISE}.sharded_state_dict",
    versions=">=0.16",
    upstream_bug=True,
    until=NOT_FIXED,
    why=(
        "saving fp32 weights raises a KeyError: upstream looks for the state of a 16-bit optimizer, which"
        " stores the inner optimizer's state under a separate name; with fp32 weights, the state is that "
        "of the inner optimizer itself"
    ),
)
def sharded_state_dict(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Make fp32 optimizers return their state in the form of 16-bit optimizers while upstream collects it."""
    from megatron.core.optimizer.optimizer import FP32Optimizer

    chained = self.chained_optimizers
    flat = [at for at, optimizer in enumerate(chained) if isinstance(optimizer, FP32Optimizer)]
    for at in flat:
        chained[at].sharded_state_dict = _under_a_name(chained[at].sharded_state_dict)
    try:
        found = original(self, *args, **kwargs)
    finally:
        for at in flat:
            del chained[at].sharded_state_dict
    if len(chained) == 1:  # upstream makes no dictionary of one
        return found["optimizer"] if flat else found
    return {at: state["optimizer"] if at in flat else state for at, state in found.items()}


def _under_a_name(make: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    return lambda *args, **kwargs: {"optimizer": make(*args, **kwargs)}


@around(
    f"{_LAYER_WISE}.__init__",
    versions=">=0.18",
    upstream_bug=True,
    until=NOT_FIXED,
    why=(
        "with fp32 weights the first step raises an AttributeError: the layer-wise optimizer is given "
        "torch's optimizers, and wraps them in Megatron's optimizers only with bf16"
    ),
)
def around_each(
    original: Callable[..., None], self: Any, optimizers: list[Any], config: Any, *args: Any, **kwargs: Any
) -> None:
    """Wrap each fp32 optimizer in Megatron's optimizer class, as 0.17 does."""
    from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer

    named = inspect.signature(original).bind(self, optimizers, config, *args, **kwargs).arguments
    states = named.get("init_state_fn_list") or [None] * len(optimizers)
    if not config.bf16:
        optimizers = [
            one if isinstance(one, MegatronOptimizer) else FP32Optimizer(one, config, make_state)
            for one, make_state in zip(optimizers, states, strict=True)
        ]
    original(self, optimizers, config, *args, **kwargs)


def package_not_taken() -> str | None:
    """Return the reason why the compiled functions of the optimizer package can be kept, or None.

    The reason is that megatron-core has not imported the package's Lion.
    """
    taken = f"{_PACKAGE}.scalar_optimizers" in sys.modules
    return None if taken else NotAsked(f"{_PACKAGE} is not imported")


_uncompiled = functools.partial(
    around,
    devices=WITHOUT_CUDA,
    condition=package_not_taken,
    why=(
        "emerging_optimizers' Lion and SOAP let torch.compile fuse their updates, which requires a C++ "
        "compiler on cpu and fails in torch_npu's inductor"
    ),
    until="torch_npu's inductor compiles them",
)


@_uncompiled("megatron.core.optimizer:get_megatron_optimizer", versions=">=0.17")
@_uncompiled("megatron.core.optimizer.muon:get_megatron_muon_optimizer", versions=">=0.17,<0.18")
def without_compiler(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace the compiled functions of the optimizer package with the originals, which give the same
    results.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE:
            for attribute, value in list(vars(module).items()):
                written = getattr(value, "_torchdynamo_orig_callable", None)
                if written is not None:
                    setattr(module, attribute, written)
    return original(*args, **kwargs)
