"""``--use-precision-aware-optimizer`` with our Adam: moments and main weights in 16 bits, on every device.

Connects ``optimizer.optimizer_config`` and the place in ``optimizer`` where the optimizer of a group of
parameters is built; ``arguments`` adds ``--reuse-fp32-param`` and refuses what does not go together.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch

from megatron_npu.adaptors.megatron_core.decorators import around, fused_optimizer_present
from megatron_npu.errors import UsageError
from megatron_npu.ops.adam import FusedAdam

_around = partial(around, condition=fused_optimizer_present)
_NAME = "transformer_engine.pytorch.optimizers"


class _OursToKeep(int):
    """``store_param_remainders`` that upstream switched off and our Adam keeps: false, as upstream has it.

    As a field of the configuration it goes into every copy of that (``dataclasses.replace``).
    """


@contextmanager
def _importable_from_transformer_engine() -> Iterator[None]:
    """Let the body import ``FusedAdam`` from where TransformerEngine, which is absent, would have it."""
    parts = _NAME.split(".")
    modules = {".".join(parts[: i + 1]): ModuleType(".".join(parts[: i + 1])) for i in range(len(parts))}
    modules[_NAME].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


@_around(
    "megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
    why="--use-precision-aware-optimizer asks whether TransformerEngine's FusedAdam takes four arguments, "
    "which ours takes as well; fp8 moments it does not",
)
def configure_with_our_adam(original: Callable[[Any], None], self: Any) -> None:
    """Let upstream look at our Adam; note whether remainders are wanted, which it forgets without theirs.

    Raises:
        UsageError: a dtype that our Adam does not keep.
    """
    if not self.use_precision_aware_optimizer or self.optimizer_cpu_offload:
        original(self)
        return
    refuse_fp8_states(self)
    asked = getattr(self, "store_param_remainders", None)  # a field since 0.13; 0.12 always does
    with _importable_from_transformer_engine():
        original(self)
    if asked or isinstance(asked, _OursToKeep):
        self.store_param_remainders = _OursToKeep()


@_around(
    "megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
    versions=">=0.13,<0.14",
    upstream_bug=True,
    until="0.14",
    why="without a recipe of fp8 the precision-aware optimizer is built without the gradients that it is "
    "then given: nothing is trained",
)
def name_a_recipe(original: Callable[[Any], None], self: Any) -> None:
    """Take the recipe that means the same; the scripts' default."""
    if self.use_precision_aware_optimizer and self.fp8_recipe is None:
        self.fp8_recipe = "delayed"
    original(self)


@_around(
    "megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
    why="without TransformerEngine 2.1 upstream does not ask for remainders in place of fp32 main weights "
    "(store_param_remainders, on by default), which our Adam keeps; its checkpoints hold fp32 all the same",
)
def ask_for_remainders(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    """Ask for them when it is built; no state exists yet."""
    result = original(config, *args, **kwargs)
    adam = getattr(result, "optimizer", None)
    if isinstance(adam, FusedAdam) and adam.use_decoupled_grad:
        kept = getattr(config, "store_param_remainders", _OursToKeep())
        adam.store_param_remainders = isinstance(kept, _OursToKeep)
    return result


def refuse_fp8_states(options: Any) -> None:
    """Refuse what only TransformerEngine keeps.

    Args:
        options: an ``OptimizerConfig``, or the scripts' arguments with dtypes or their names.

    Raises:
        UsageError: a moment would be fp8.
    """
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(options, name, None) in ("fp8", torch.uint8):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} fp8 without TransformerEngine", "fp32, bf16 or fp16", f"Give {flag} bf16."
            )


def check_precision_aware_optimizer(args: Namespace) -> None:
    """Switch the precision-aware optimizer on for --reuse-fp32-param; refuse what it does not go with.

    Raises:
        UsageError: a flag is missing or does not go with it.
    """
    flag = "--use-precision-aware-optimizer"
    if args.reuse_fp32_param:
        flag = "--reuse-fp32-param"
        if not args.bf16 or args.main_params_dtype not in ("fp32", torch.float32):
            raise UsageError(
                f"{flag} without bf16 parameters that have fp32 main weights",
                "--bf16, and no --main-params-dtype but fp32",
                "Change them: the main weight is the parameter and the 16 bits that it lacks.",
            )
        args.use_precision_aware_optimizer = True
    if not args.use_precision_aware_optimizer or args.optimizer_cpu_offload:
        return
    refuse_fp8_states(args)
    if not args.use_distributed_optimizer:
        raise UsageError(f"{flag} alone", "--use-distributed-optimizer together with it", "Add it.")
    if args.ckpt_format == "torch" and (args.save or args.load):
        raise UsageError(
            f"{flag} with --ckpt-format torch",
            "--ckpt-format torch_dist",
            "Change it: of Megatron's own format the main weights are read into the rounded ones.",
        )
