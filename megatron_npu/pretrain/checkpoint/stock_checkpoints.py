"""Describe checkpoints of Megatron-LM's own scripts in the same form as checkpoints of the built-in trainer.

The trainer writes ``arguments.json``. The scripts store their argparse.Namespace in a pickle, which is in
``common.pt`` beside the shards (``torch_dist``), among the shards since 0.19, or in each rank's file
(``torch``). The pickle is read with torch's ``weights_only``, and Megatron and Python types become inert
values: nothing that the file names is imported or called.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.checkpoint import checkpoint_description, checkpoint_files, torch_format
from megatron_npu.pretrain.flags import stock_arguments
from megatron_npu.safe_files import safe_load, torch_readers


def find(root: str | Path, step: int | None = None) -> checkpoint_description.CheckpointInfo | None:
    """Return the newest checkpoint under ``root``, whether saved by the trainer or by a stock script, or
    None.

    Only the weights are loaded from a stock script's checkpoint, not the optimizer state and random states.
    Values that depend on its tokenizer are not among its arguments yet.

    Raises:
        UsageError: the checkpoint cannot be read, or contains a model that the trainer does not support.
    """
    path = checkpoint_files.newest(root, step) or torch_format.untracked(root)
    if path is None or (path / checkpoint_files.DESCRIPTION).is_file():
        return checkpoint_description.find(root, step)
    if torch_format.holds_ranks(path):
        return _of_ranks(path)
    common = path / checkpoint_files.COMMON
    if common.is_file():
        return _sharded(path, common, read_common(common))
    if checkpoint_files.common_lies_among_shards(path):
        return _sharded(path, path, _read_among_shards(path))
    return checkpoint_description.find(root, step)


def existing(root: str | Path, step: int | None = None) -> checkpoint_description.CheckpointInfo:
    """Return the checkpoint that ``find`` returns, or raise an error if there is none.

    Raises:
        UsageError: the checkpoint does not exist or cannot be read.
    """
    found = find(root, step)
    if found is None:
        raise checkpoint_files.no_checkpoint(root)
    return found


def flags_of(path: Path) -> dict[str, Any]:
    """Return the flags with plain values that a stock script's checkpoint contains.

    Args:
        path: the checkpoint's directory, as found by ``existing``.

    Raises:
        UsageError: the checkpoint cannot be read.
    """
    if torch_format.holds_ranks(path):
        args: Mapping[str, Any] = torch_format.Checkpoint(path).args
    else:
        common = path / checkpoint_files.COMMON
        values = read_common(common) if common.is_file() else _read_among_shards(path)
        args = vars(values["args"]) if isinstance(values.get("args"), Namespace) else {}
    return {name: value for name, value in args.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _of_ranks(path: Path) -> checkpoint_description.CheckpointInfo:
    found = torch_format.Checkpoint(path)
    if found.args.get("num_experts"):
        raise UsageError(
            f"{path} contains a model with experts in the format torch, which does not store where each "
            "expert is",
            remedy="Save it with --ckpt-format torch_dist.",
        )
    return _weights_alone(
        path, found.args, iteration=found.iteration, train=found.train_samples, valid=found.valid_samples
    )


def _sharded(path: Path, source: Path, values: dict[str, Any]) -> checkpoint_description.CheckpointInfo:
    if not isinstance(values.get("args"), Namespace):
        raise UsageError(
            f"{source} contains no arguments; it must be a checkpoint that pretrain_gpt.py or "
            "`megatron-npu pretrain` has written",
            remedy="Load another checkpoint.",
        )
    return _weights_alone(path, vars(values["args"]), iteration=int(values.get("iteration", 0)))


def _weights_alone(
    path: Path, args: Mapping[str, Any], *, iteration: int, train: int = 0, valid: int = 0
) -> checkpoint_description.CheckpointInfo:
    return checkpoint_description.CheckpointInfo(
        path=path,
        iteration=iteration,
        consumed_train_samples=train,
        consumed_valid_samples=valid,
        has_optimizer=False,
        has_rng=False,
        optimizer_sharding=None,
        arguments=stock_arguments.to_driver(args),
    )


def read_common(file: Path) -> dict[str, Any]:
    """Return the content of a file ``common.pt`` without executing code from it.

    Raises:
        UsageError: the file is damaged, or contains something other than plain values.
    """
    return _values(safe_load.read(file, safe_load.OF_STOCK_SCRIPTS), file)


def _read_among_shards(path: Path) -> dict[str, Any]:
    """Return a list with the common values, which 0.19 stores among the shards.

    No code from the file is executed.
    """
    content = torch_readers.stored_value(path, checkpoint_files.COMMON_OBJECT)
    values = safe_load.read_part(content, path, safe_load.OF_STOCK_SCRIPTS)
    return _values(values[0] if isinstance(values, list) and values else values, path)


def _values(found: object, file: Path) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise safe_load.refusal(file, f"the file contains a {type(found).__name__}")
    return found


def require_vocabulary(found: checkpoint_description.CheckpointInfo, tokens: int) -> None:
    """Check that the embedding in a stock script's checkpoint has a row for every token.

    Args:
        found: the checkpoint.
        tokens: number of tokens of the run's tokenizer.

    Raises:
        UsageError: the embedding has fewer rows than the tokenizer has tokens.
    """
    rows = found.arguments["padded_vocab_size"]
    if rows is not None and rows < tokens:
        raise UsageError(
            f"--load {found.path} has a vocabulary of {rows} tokens including padding, but the "
            f"tokenizer has more tokens, {tokens}",
            remedy="Pass the tokenizer files that training used.",
        )
