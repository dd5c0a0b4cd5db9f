"""Support ``--fine-grained-activation-offloading`` with local layers and on NPUs.

Before 0.16, the whole implementation is ours.

Patches ``pipeline_parallel.fine_grained_activation_offload``, ``pipeline_parallel.utils``,
``transformer.transformer_block``, ``models.gpt.gpt_model`` and ``extensions.transformer_engine`` of
``megatron.core``; ``arguments`` hides the flag from upstream's check.
"""

from __future__ import annotations

import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from megatron_npu.adaptors.megatron_core.decorators import (
    WITHOUT_CUDA,
    around,
    constant,
    records,
    replace,
    transformer_engine_present,
)
from megatron_npu.adaptors.megatron_core.options.script_arguments import script_arguments
from megatron_npu.adaptors.shared import activation_offloading
from megatron_npu.adaptors.shared.arguments import declaring
from megatron_npu.options import memory_flags

FLAG = memory_flags.OFFLOADING

activation_offloading.connect(records)

constant(
    "megatron.core.extensions.transformer_engine:cpu_offload",
    SimpleNamespace(CPUOffloadEnabled=False),
    versions=">=0.16",
    condition=transformer_engine_present,
    why=f"{FLAG} tells TransformerEngine's layers that it is on, and raises a RuntimeError without them; "
    "our version moves what autograd saves, for any layers",
)


@replace(
    "megatron.core.pipeline_parallel.utils:set_ideal_affinity_for_current_gpu",
    versions=">=0.16",
    devices=WITHOUT_CUDA,
    why=f"{FLAG} binds the process to the cores near its GPU, which it queries from CUDA's driver",
)
def stay_on_all_cores() -> None:
    """Keep the CPU affinity that the launcher has set."""


@around(
    "megatron.core.pipeline_parallel.fine_grained_activation_offload:"
    "ChunkOffloadHandler._can_manage_tensor_for_offload",
    versions=">=0.19",
    devices=("npu",),
    why=(
        "upstream's offloading handles only tensors on cuda: on an NPU, nothing is moved, without any message"
    ),
)
def manage_tensors_of_npus(original: Callable[[torch.Tensor], bool], tensor: torch.Tensor) -> bool:
    """Treat tensors on an NPU, except parameters, in the same way as upstream treats tensors on a GPU."""
    if tensor.device.type == "npu":
        return not isinstance(tensor, torch.nn.Parameter)
    return original(tensor)


# Of each model, where the memory of its parameters begins; the model may be a chunk of a pipeline.
_parameters: weakref.WeakKeyDictionary[torch.nn.Module, set[int]] = weakref.WeakKeyDictionary()


@around(
    "megatron.core.models.gpt.gpt_model:GPTModel.preprocess_for_fine_grained_offloading",
    versions=">=0.16",
    devices=("npu",),
    why=(
        "upstream marks parameters as not to be moved, but autograd returns other tensors that share "
        "their memory"
    ),
)
def note_parameters(original: Callable[[Any], None], self: Any) -> None:
    """Record the memory addresses of the parameters before each forward pass."""
    _parameters[self] = {parameter.untyped_storage().data_ptr() for parameter in self.parameters()}
    original(self)


@around(
    "megatron.core.pipeline_parallel.fine_grained_activation_offload:"
    "ChunkOffloadHandler.tensor_need_offloading_checker",
    versions=">=0.16",
    devices=("npu",),
    why=(
        "upstream's offloading would move, for every layer, what stays on the device anyway (weights, and"
        " the shared attention mask of 4 MiB), so that a step would need more memory than without "
        "offloading"
    ),
)
def leave_what_stays(original: Callable[..., bool], self: Any, tensor: torch.Tensor) -> bool:
    """Return False for boolean masks and for tensors in a parameter's memory, so that they are not
    offloaded.
    """
    if tensor.dtype is torch.bool:
        return False
    start = tensor.untyped_storage().data_ptr()
    return not any(start in starts for starts in _parameters.values()) and original(self, tensor)


def refuse_on_the_host(args: Namespace) -> None:
    """Reject activation offloading on the cpu device, because its memory already is host memory.

    Raises:
        UsageError: the device is a cpu, whose activations are already in host memory.
    """
    if getattr(args, "fine_grained_activation_offloading", False):
        memory_flags.refuse_offloading_on_the_host()


@contextmanager
def unseen_by_upstream(args: Namespace) -> Iterator[None]:
    """Unset the flag during upstream's validation, which would reject it without TransformerEngine's layers.

    Before 0.16, the flag is ours, and ``check_flags`` reads it.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    known = hasattr(TransformerConfig, "fine_grained_activation_offloading")
    wanted = getattr(args, "fine_grained_activation_offloading", False) and known
    wanted = wanted and not transformer_engine_present()
    if wanted:
        args.fine_grained_activation_offloading = False
    try:
        yield
    finally:
        if wanted:
            args.fine_grained_activation_offloading = True


def options_of(config: Any) -> tuple[tuple[str, ...], int]:
    """Return which modules to offload and the minimum tensor size, for versions before 0.16.

    Without the flag, there are no modules.

    A stock script has both among its arguments; a program that builds its model in Python sets
    ``offload_modules`` and ``min_offloaded_tensor_size`` in the configuration.
    """
    source = config if hasattr(config, "offload_modules") else script_arguments()
    modules = tuple(getattr(source, "offload_modules", None) or ())
    return modules, getattr(source, "min_offloaded_tensor_size", memory_flags.SMALLEST_OFFLOADED)


@around(
    "megatron.core.transformer.transformer_block:TransformerBlock._build_layers",
    versions="<0.16",
    devices=("npu", "cuda"),
    why=f"{FLAG}, which upstream has since 0.16",
)
def move_what_layers_save(original: Callable[[Any], None], self: Any) -> None:
    """Attach offloading to modules of the layers if the flags enable it."""
    original(self)
    modules, smallest = options_of(self.config)
    if modules:
        activation_offloading.attach(self.layers, modules, smallest)


around(
    "megatron.training.arguments:add_megatron_arguments",
    versions="<0.16",
    why=f"{FLAG} and --offload-modules, which upstream has since 0.16",
    order=-1,  # in the help, before the flags of arguments.py
)(declaring(memory_flags.add_activation_offloading))


@around(
    "megatron.training.arguments:validate_args",
    versions="<0.16",
    why=f"{FLAG} needs a device with its own memory, and modules that are not recomputed",
    order=-1,
)
def check_flags(original: Callable[..., Namespace], args: Namespace, *rest: Any, **kwargs: Any) -> Namespace:
    """Reject unsupported combinations of flags, after upstream has determined which layers are recomputed."""
    validated = original(args, *rest, **kwargs)
    memory_flags.check_activation_offloading(validated)
    return validated
