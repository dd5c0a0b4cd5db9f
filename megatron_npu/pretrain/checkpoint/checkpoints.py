"""Save and load checkpoints with ``megatron.core.dist_checkpointing``.

A run can resume with another parallel layout.

A checkpoint is written to a hidden directory and renamed when every rank is done; then the tracker is
updated. The keys are those of Megatron-LM's own checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_npu import watchdog
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import checksums, disks, hybrid_layers, stranger_weights
from megatron_npu.pretrain.checkpoint import (
    checkpoint_compatibility,
    checkpoint_description,
    checkpoint_failures,
    checkpoint_files,
    checkpoint_folder,
    dist_ckpt_versions,
    fsdp_checkpoint,
    generators,
    resumed_settings,
    stock_checkpoints,
    torch_format,
)
from megatron_npu.pretrain.checkpoint.weights import row_shards, sharded_weights, vocab_padding
from megatron_npu.pretrain.flags import stock_arguments
from megatron_npu.pretrain.flags.checkpoint_parts import LoadFlags, StoreFlags
from megatron_npu.pretrain.model.gpt import mean_stage, unwrap

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


_PARTS = ("embedding", "decoder", "encoder", "output_layer", "mtp")  # where keys of weights begin


@dataclass(frozen=True)
class Position:
    """Progress of a run: the iteration, and the number of samples that all ranks have consumed."""

    iteration: int = 0
    train_samples: int = 0
    valid_samples: int = 0


@dataclass(frozen=True)
class State:
    """The objects of a run whose state is stored in a checkpoint."""

    model: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler


@watchdog.phase(watchdog.SAVING)
def save(
    flags: StoreFlags, state: State, position: Position, common: Mapping[str, Any] | None = None
) -> Path:
    """Write the checkpoint for ``position``, and return its directory. All ranks must call this.

    Args:
        common: plain values that are stored with the state; they must be the same on all ranks.
    """
    with checkpoint_folder.writing(flags.save, position.iteration) as part:
        _write(flags, state, position, part, common or {})
    return checkpoint_files.directory(flags.save, position.iteration)


def begin_async(flags: StoreFlags, state: State, position: Position, part: Path) -> AsyncRequest:
    """Return a request that makes megatron-core's writer queue write the checkpoint for ``position``.

    The files are written to ``part``. The state is copied to the host when the writer starts. All ranks must
    call this.
    """
    return _shards(flags, state, position, part, {}, in_background=True)


def _write(
    flags: StoreFlags, state: State, position: Position, part: Path, common: Mapping[str, Any]
) -> None:
    """Write the files of a checkpoint into the folder ``part``."""
    _shards(flags, state, position, part, common, in_background=False)
    complete(flags, position, part)


def _shards(
    flags: StoreFlags,
    state: State,
    position: Position,
    part: Path,
    common: Mapping[str, Any],
    *,
    in_background: bool,
) -> Any:
    """Write megatron-core's files into the folder ``part``, or return a request for a background writer."""
    from megatron.core import dist_checkpointing

    metadata = dist_ckpt_versions.metadata(flags)
    content = _state_dict(state, metadata, optimizer=not flags.no_save_optim, rng=not flags.no_save_rng)
    content["iteration"] = position.iteration
    content |= common
    if fsdp_checkpoint.sharded(state.model):
        return fsdp_checkpoint.write(part, state.model[0], content)
    content.setdefault(
        "args", stock_arguments.to_stock(flags.all_flags, position.train_samples, position.valid_samples)
    )
    keywords = dist_ckpt_versions.save_keywords(metadata, in_background=in_background)
    return dist_checkpointing.save(content, str(part), **keywords)


def complete(flags: StoreFlags, position: Position, part: Path) -> None:
    """Add the description and the checksums to a checkpoint after all ranks have written their files.

    All ranks must call this.
    """
    dist.barrier()
    if dist.get_rank() == 0:
        checkpoint_description.describe(
            part, _description(flags, position, dist_ckpt_versions.metadata(flags))
        )
    dist.barrier()
    checksums.write(part)


def _description(
    flags: StoreFlags, position: Position, metadata: dict[str, Any]
) -> checkpoint_description.CheckpointInfo:
    return checkpoint_description.CheckpointInfo(
        path=Path(),
        iteration=position.iteration,
        consumed_train_samples=position.train_samples,
        consumed_valid_samples=position.valid_samples,
        has_optimizer=not flags.no_save_optim,
        has_rng=not flags.no_save_rng,
        optimizer_sharding=metadata.get("distrib_optim_sharding_type"),
        arguments=checkpoint_description.plain_arguments(vars(flags.all_flags)),
    )


@watchdog.phase("loading")
def load(flags: LoadFlags, state: State) -> Position:
    """Load the parts of a checkpoint that the flags select, and return the position to resume from.

    All ranks must call this.

    Raises:
        UsageError: files are missing or damaged, or the schedules differ and no flag selects one.
    """
    found = stock_checkpoints.existing(flags.load, flags.ckpt_step)
    reading = _load_own if found.is_own else _load_stock
    if checkpoint_files.is_of_fsdp(found.path):
        reading = _load_of_fsdp
    verifying = checksums.verifying(found.path) if flags.verify_checkpoint else contextlib.nullcontext()
    with disks.whole(found.path), verifying:
        position = reading(flags, state, found)
    stranger_weights.tell_of_loaded(found.path, state.model)
    return position


def _load_own(flags: LoadFlags, state: State, found: checkpoint_description.CheckpointInfo) -> Position:
    """Load a checkpoint that the built-in trainer saved."""
    from megatron.core import dist_checkpointing

    path = str(found.path)
    with checkpoint_failures.reading(path):
        metadata = dist_ckpt_versions.saved_metadata(path, found.optimizer_sharding)
    rng = flags.load_rng and _same_ranks(flags, found)
    wanted = _state_dict(state, metadata, optimizer=flags.load_optim, rng=rng, loading=True)
    with checkpoint_failures.reading(path):
        content = dist_checkpointing.load(wanted, path)
        _load_weights(state.model, content)
        if flags.load_optim:
            optimizer = row_shards.shared_out(content["optimizer"], state.optimizer.state_dict())
            _load_optimizer(flags, state, optimizer, content["opt_param_scheduler"])
        else:
            _begin_optimizer(flags, state, found, content.get("opt_param_scheduler"))
        if rng:
            generators.set_state(content["rng_state"][0])
    return _position(flags, found)


def _load_of_fsdp(flags: LoadFlags, state: State, found: checkpoint_description.CheckpointInfo) -> Position:
    """Load a checkpoint that was saved with Megatron's FSDP into a model with or without sharding."""
    if not fsdp_checkpoint.sharded(state.model):
        return _load_stock(flags, state, found)
    rng = flags.load_rng and _same_ranks(flags, found)
    content = _fsdp_state_dict(state, optimizer=flags.load_optim, rng=rng)
    if found.has_optimizer:
        content["opt_param_scheduler"] = state.schedule.state_dict()
    fsdp_checkpoint.read(found.path, state.model[0], content)
    if flags.load_optim:
        _load_optimizer(flags, state, content["optimizer"], content["opt_param_scheduler"])
    else:
        _begin_schedule(flags, state, found, content.get("opt_param_scheduler"))
    if rng:
        (states,) = content["rng_state"].values()
        generators.set_state(states[0])
    return _position(flags, found)


def _load_stock(flags: LoadFlags, state: State, found: checkpoint_description.CheckpointInfo) -> Position:
    """Load the weights from a checkpoint of Megatron-LM's own scripts."""
    load_weights(state.model, found.path)
    _begin_optimizer(flags, state, found)
    return _position(flags, found)


def _load_optimizer(
    flags: LoadFlags, state: State, optimizer: Mapping[str, Any], schedule: dict[str, Any]
) -> None:
    """Load the optimizer's moments and main weights, and resume the schedule with the settings from the
    flags.
    """
    settings = resumed_settings.of_flags(state.optimizer)
    state.optimizer.load_state_dict(optimizer)
    resumed_settings.restore(flags, state.optimizer, settings)
    resumed_settings.load_schedule(state.schedule, schedule)


def _begin_optimizer(
    flags: LoadFlags,
    state: State,
    found: checkpoint_description.CheckpointInfo,
    schedule: dict[str, Any] | None = None,
) -> None:
    """Initialize the optimizer from the loaded weights.

    Args:
        schedule: the state of the schedule in the checkpoint, if any.
    """
    saved = found.arguments["padded_vocab_size"]
    if saved < flags.padded_vocab_size:
        vocab_padding.fill(state.model, saved, flags.tokenizer_vocab_size)
    state.optimizer.reload_model_params()
    _begin_schedule(flags, state, found, schedule)


def _begin_schedule(
    flags: LoadFlags,
    state: State,
    found: checkpoint_description.CheckpointInfo,
    schedule: dict[str, Any] | None,
) -> None:
    samples = found.consumed_train_samples or found.iteration * flags.global_batch_size
    resumed_settings.go_on_without_optimizer(flags, state.schedule, schedule, samples)


def _position(flags: LoadFlags, found: checkpoint_description.CheckpointInfo) -> Position:
    if flags.finetune:
        return Position()
    return Position(found.iteration, found.consumed_train_samples, found.consumed_valid_samples)


@watchdog.phase("loading")
def load_weights(model: Sequence[torch.nn.Module], path: str | Path) -> None:
    """Load only the weights of a checkpoint, which may have any layout. All ranks must call this.

    Raises:
        UsageError: files are missing or damaged, or contain weights that the model does not have.
    """
    from megatron.core import dist_checkpointing

    if torch_format.holds_ranks(Path(path)):
        return torch_format.load_weights(model, Path(path))
    if checkpoint_files.is_of_fsdp(Path(path)):
        return fsdp_checkpoint.load_weights(model, Path(path))
    metadata = dist_ckpt_versions.module_metadata({})
    wanted = _cut_weights(model, metadata)
    with checkpoint_failures.reading(path):
        saved = dist_checkpointing.load_tensors_metadata(str(path))
        if hybrid_layers.is_of_hybrid(saved):
            hybrid_layers.point_at(wanted)
        _require_all_used(wanted, saved, str(path))
        sharded_weights.read_in_place(wanted)
        content = dist_checkpointing.load(wanted, str(path))
        _load_weights(model, content)


def _require_all_used(wanted: dict[str, Any], saved: Iterable[str], path: str) -> None:
    """Check that all weights in the checkpoint are used.

    megatron-core silently ignores unused weights.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    used = _of_all_ranks({sharded.key for sharded in nested_values(wanted)})
    rest = sorted(key for key in set(saved) - used if key.partition(".")[0] in _PARTS)
    if rest:
        raise UsageError(
            f"{path} has the weight {rest[0]}{f' and {len(rest) - 1} more weights' if rest[1:] else ''}, "
            "which the model described by its arguments does not have",
            remedy="Load a checkpoint of a supported model.",
        )


def _of_all_ranks(keys: set[str]) -> set[str]:
    """Return the union of the keys of all ranks.

    Pipeline stages have different keys.
    """
    parts: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(parts, keys)
    return set().union(*parts)


def _load_weights(model: Sequence[torch.nn.Module], content: dict[str, Any]) -> None:
    for key, chunk in _chunks(model).items():
        own = dict(chunk.named_parameters(remove_duplicate=False))
        chunk.load_state_dict(row_shards.shared_out(content[key], own))


def _chunks(model: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Return the unwrapped model chunks under Megatron-LM's names."""
    if len(model) == 1:
        return {"model": unwrap(model[0])}
    return {f"model{number}": unwrap(chunk) for number, chunk in enumerate(model)}


def _cut_weights(model: Sequence[torch.nn.Module], metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of each model chunk as shards of the whole weights."""
    result = {}
    for stage, (key, chunk) in enumerate(_chunks(model).items()):
        mean_stage(stage if len(model) > 1 else None)
        result[key] = row_shards.cut_as_rows(chunk, chunk.sharded_state_dict(metadata=metadata))
    return result


def _state_dict(
    state: State, metadata: dict[str, Any], *, optimizer: bool, rng: bool, loading: bool = False
) -> dict[str, Any]:
    if fsdp_checkpoint.sharded(state.model):
        return _fsdp_state_dict(state, optimizer=optimizer, rng=rng)
    asked = dist_ckpt_versions.module_metadata(metadata)
    content = _cut_weights(state.model, asked)
    if optimizer:
        content["optimizer"] = state.optimizer.sharded_state_dict(
            content, is_loading=loading, **dist_ckpt_versions.optimizer_keywords(metadata)
        )
        content["opt_param_scheduler"] = state.schedule.state_dict()
    if rng:
        content["rng_state"] = generators.sharded_state()
    content["checkpoint_version"] = 3.0  # Megatron-LM's number for this order of the attention weights
    return content


def _fsdp_state_dict(state: State, *, optimizer: bool, rng: bool) -> dict[str, Any]:
    content = fsdp_checkpoint.state_dict(state.model[0], state.optimizer if optimizer else None)
    if optimizer:
        content["opt_param_scheduler"] = state.schedule.state_dict()
    if rng:
        content["rng_state"] = {"(0, 0)": [generators.state()]}  # of the one pipeline and tensor rank
    content["checkpoint_version"] = 3.0
    return content


def _same_ranks(flags: LoadFlags, found: checkpoint_description.CheckpointInfo) -> bool:
    """Return True if each rank is able to load its own random states.

    This requires unchanged model-parallel sizes.
    """
    same = checkpoint_compatibility.same_model_parallel_sizes(found, flags)
    if flags.expert_model_parallel_size > 1:  # which is a part of data parallelism
        same = same and found.arguments.get("data_parallel_size") == flags.data_parallel_size
    if not same and dist.get_rank() == 0:
        print(" the parallel layout has changed: random numbers start again from --seed", flush=True)
    return same


def advance(position: Position, *, train: int = 0, valid: int = 0, iterations: int = 0) -> Position:
    """Return the position after the given numbers of additional iterations and samples."""
    return replace(
        position,
        iteration=position.iteration + iterations,
        train_samples=position.train_samples + train,
        valid_samples=position.valid_samples + valid,
    )
