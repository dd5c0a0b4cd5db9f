"""Read and write checkpoints of models sharded by Megatron's FSDP, in upstream's ``fsdp_dtensor`` format.

``torch.distributed.checkpoint`` writes each weight and moment as one tensor, regardless of which rows each
rank has (the split is uneven, and a rank has no rows of most tensors), so a run can resume with another
number of ranks. The names are those of Megatron-LM's own scripts, which store weights as the optimizer has
them: in fp32, with the prefixes of the wrappers (``module.`` for the FSDP, and another one for 16-bit
models), and with the two halves of a gated MLP separate (``_w``, ``_v``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.tensor import DTensor

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.checkpoint import checkpoint_failures, checkpoint_files

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

_GROUPS = "param_to_group_meta"  # upstream's name for the settings of each weight's group
_HALVES = ("_w", "_v")  # gate and input of a gated MLP


def sharded(model: Sequence[torch.nn.Module]) -> bool:
    """Return True if a model is sharded by Megatron's FSDP, so that its checkpoints use this format."""
    return hasattr(model[0], "megatron_fsdp_dist_index")


def state_dict(model: Any, optimizer: MegatronOptimizer | None) -> dict[str, Any]:
    """Return the weights and the optimizer state of a run in upstream's structure.

    Args:
        model: the only chunk, wrapped in Megatron's FSDP.
        optimizer: the optimizer, or None to leave out its state.
    """
    content = {"model": model.state_dict_for_save_checkpoint()}
    if optimizer is not None:
        (part,) = getattr(optimizer, "chained_optimizers", [optimizer])
        described = {"distrib_optim_sharding_type": checkpoint_files.OF_FSDP}
        content["optimizer"] = part.sharded_state_dict(content, metadata=described)
    return content


def write(folder: Path, model: Any, content: dict[str, Any]) -> None:
    """Write ``content``, including the result of ``state_dict``, to the folder ``folder``.

    All ranks must call this.
    """
    dcp.save(_cut(model, content), storage_writer=FileSystemWriter(folder))


def read(folder: Path, model: Any, content: dict[str, Any]) -> None:
    """Read a checkpoint into the tensors of ``content``, and load its weights into the model.

    All ranks must call this.

    Args:
        folder: the checkpoint's directory.
        model: the model, wrapped in Megatron's FSDP.
        content: the same structure as passed to ``write``.

    Raises:
        UsageError: files are missing or damaged.
    """
    with checkpoint_failures.reading(folder):
        reader = FileSystemReader(folder)
        if "optimizer" in content:
            _ask_for_all(content["optimizer"][_GROUPS], reader)
        dcp.load(_cut(model, content), storage_reader=reader)
    model.module.install_optimized_model_weights()  # from the fp32 weights to those that compute
    model.start_param_sync()  # and to the other ranks, as after a step


def _ask_for_all(groups: dict[str, dict[str, Any]], reader: FileSystemReader) -> None:
    """Add settings that the parameter groups lack, so that the checkpoint's values for them are read.

    For example, a new optimizer has no step count yet.
    """
    prefix = f"optimizer.{_GROUPS}."
    for key in reader.read_metadata().state_dict_metadata:
        name, _, setting = key.removeprefix(prefix).rpartition(".")
        if key.startswith(prefix) and name in groups:
            groups[name].setdefault(setting, None)


def _cut(model: Any, content: dict[str, Any]) -> dict[str, Any]:
    """Return ``content`` with gated MLPs split into halves, and with the position of each shard added."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint

    cut = {**content, "model": {k: v for k, v in content["model"].items() if isinstance(v, Tensor)}}
    if model.config.gated_linear_unit:
        weights, optimizer = fsdp_dtensor_checkpoint.handle_swiglu_in_state_dict(
            model, cut["model"], cut.get("optimizer")
        )
        cut |= {"model": weights} | ({} if optimizer is None else {"optimizer": optimizer})
    uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(cut)
    return cut


def _bare(name: str) -> str:
    """Return the name of a weight without the prefixes that wrappers add."""
    return re.sub(r"^(module\.)+", "", name)


def load_weights(model: Sequence[torch.nn.Module], folder: Path) -> None:
    """Load the weights only, into a model that is not sharded. All ranks must call this.

    Args:
        model: the only chunk, wrapped or not.
        folder: the checkpoint's directory.

    Raises:
        UsageError: the model is partitioned, files are missing or damaged, or the weights belong to another
            model.
    """
    from megatron.core import parallel_state

    sizes = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if sizes != (1, 1) or any(isinstance(parameter, DTensor) for parameter in model[0].parameters()):
        raise UsageError(
            f"{folder} was saved by Megatron's FSDP and can be loaded only with tensor and pipeline "
            "parallel size 1 and without torch's FSDP",
            remedy="For other layouts, first save its weights again with one process (--load, "
            "--no-load-optim, --save).",
        )
    with checkpoint_failures.reading(folder):
        reader = FileSystemReader(folder)
        names = {
            _bare(key.removeprefix("model.")): key
            for key in reader.read_metadata().state_dict_metadata
            if key.startswith("model.")
        }
        wanted = dict(_whole(model[0], names))
        _require_same(names.keys(), wanted.keys(), folder)
        dcp.load({names[name]: part for name, part in wanted.items()}, storage_reader=reader)


def _whole(model: torch.nn.Module, saved: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight, unsharded, with its name.

    A weight that was saved in halves is yielded half by half.
    """
    for wrapped, parameter in model.named_parameters():
        name = _bare(wrapped)
        if name + _HALVES[0] in saved:
            for half, part in zip(_HALVES, parameter.data.chunk(2), strict=True):
                yield name + half, part
        else:
            yield name, parameter.data


def _require_same(saved: Any, wanted: Any, folder: Path) -> None:
    differing = sorted(saved ^ wanted)
    if differing:
        where = "the checkpoint" if differing[0] in saved else "the model"
        raise UsageError(
            f"{folder} and the model must have the same weights, but {differing[0]} is only in {where}",
            remedy="Load a checkpoint of a model with the same architecture.",
        )
