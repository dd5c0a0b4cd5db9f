"""What the Megatrons that train with DeepSpeed's engine have in common."""

from __future__ import annotations

import argparse
import enum
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_npu import deepspeed_device, devices, files, safe_load
from megatron_npu.adaptors.shared import rendezvous
from megatron_npu.adaptors.shared.checkpoint_values import harmless
from megatron_npu.adaptors.shared.start import announce_first, connect_old_tree
from megatron_npu.errors import UsageError
from megatron_npu.patching.registry import Recorder

HIGHEST_STAGE_OF_A_PIPELINE = 1  # DeepSpeed 0.19.8, PipelineEngine.__init__

# --- start ------------------------------------------------------------------------------------------


def connect_start(recorder: Recorder) -> None:
    """Record what a tree of old needs at its start, and what DeepSpeed needs.

    Args:
        recorder: that of the tree.
    """
    connect_old_tree(recorder)
    recorder.around("megatron.training:train_step", why="the place to say once what was patched")(
        announce_first
    )
    recorder.around(
        "megatron.initialize:_initialize_distributed",
        why="DeepSpeed asks MPI who this process is unless a launcher says it, counts sockets as the devices "
        "of a CPU, and compiles a communication over shared memory for inference at the first start on one",
    )(meet)


def meet(original: Callable[..., None]) -> None:
    """Tell a process that runs alone who it is; leave out what DeepSpeed would compile."""
    rendezvous.provide_address()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    # how many devices DeepSpeed sees on a CPU: one for each process
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    deepspeed_device.compile_nothing()
    original()


# --- checkpoints ------------------------------------------------------------------------------------


def connect_checkpoints(recorder: Recorder, enumerations: Callable[[], Iterable[ModuleType]]) -> None:
    """Record that checkpoints, also of DeepSpeed's engine, are read without running code, and written 640.

    Args:
        recorder: that of the tree.
        enumerations: returns the modules whose enumerations the saved arguments name.
    """

    @recorder.around(
        "megatron.checkpointing:load_checkpoint",
        why="torch.load of today refuses argparse.Namespace, and upstream then ends the process with exit "
        "code 0; DeepSpeed's engine, and torch.load of 2.5 and before, run whatever code the file holds",
    )
    def load_data_only(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        """Read tensors, numbers and arguments, nothing that runs; say what is wrong with a bad file."""
        kinds = [kind for module in enumerations() for kind in vars(module).values()]
        named = [kind for kind in kinds if isinstance(kind, enum.EnumMeta)]
        with (
            safe_load.allowing(*harmless(), *named, *deepspeed_device.harmless()),
            safe_load.weights_only(),
        ):
            try:
                return original(*args, **kwargs)
            except SystemExit as stop:  # upstream: print_rank_0(error); sys.exit()
                raise _unreadable(stop.__context__) from stop.__context__

    recorder.around("megatron.checkpointing:save_checkpoint", why="files are to be 640, folders 750")(
        save_privately
    )


def _unreadable(cause: BaseException | None) -> UsageError:
    from megatron import get_args

    reason = str(cause).strip().partition("\n")[0]
    return UsageError(
        f"the checkpoint in {get_args().load} cannot be read ({type(cause).__name__}: {reason})",
        "a checkpoint of Megatron-DeepSpeed that holds tensors and arguments only",
        "Check that its files are complete; never load one from a source that you do not trust.",
    )


def save_privately(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Save private files."""
    mask = files.tighten_umask()
    try:
        original(*args, **kwargs)
    finally:
        os.umask(mask)


# --- what cannot work -------------------------------------------------------------------------------


def refuse_configuration(args: argparse.Namespace, *, pipeline: bool, remedy: str) -> None:
    """Refuse what DeepSpeed's engine does not do with this configuration.

    Args:
        args: upstream's, with ``--deepspeed``.
        pipeline: the model is a pipeline, which DeepSpeed's engine shards at stages 0 and 1 alone.
        remedy: what to do about a higher stage.

    Raises:
        UsageError: no configuration that can be read, a stage of ZeRO that a pipeline does not have, fp16
            on a CPU.
    """
    config = _read(args.deepspeed_config)
    stage = max(int(args.zero_stage), int((config.get("zero_optimization") or {}).get("stage", 0)))
    if pipeline and stage > HIGHEST_STAGE_OF_A_PIPELINE:
        raise UsageError(
            f"ZeRO stage {stage} with --deepspeed, whose model is a pipeline here",
            f"--zero-stage 0 or {HIGHEST_STAGE_OF_A_PIPELINE}, in the configuration, too: DeepSpeed's engine "
            "for pipelines shards the optimizer's state alone",
            remedy,
        )
    if (config.get("fp16") or {}).get("enabled") and devices.current().name == "cpu":
        raise UsageError(
            "fp16 with --deepspeed on a CPU",
            "bf16 or fp32: DeepSpeed has no fp16 there",
            "Train with --bf16, or without --deepspeed: the tree's own fp16 runs on a CPU.",
        )


def _read(path: str | None) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    Raises:
        UsageError: there is none, or it is no JSON object.
    """
    expected, remedy = "a file with a JSON object", "Name DeepSpeed's configuration with --deepspeed_config."
    if not path or not Path(path).is_file():
        raise UsageError(f"--deepspeed_config {path}: no such file", expected, remedy)
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UsageError(f"--deepspeed_config {path}: {error}", expected, remedy) from error
    if not isinstance(config, dict):
        raise UsageError(f"--deepspeed_config {path}: a {type(config).__name__}", expected, remedy)
    return config
