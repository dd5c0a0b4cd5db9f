"""Provide flags and start-up code for Megatron checkouts that train with DeepSpeed's engine."""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_npu import devices, watchdog
from megatron_npu.adaptors.shared import checksums as of_scripts
from megatron_npu.adaptors.shared import rendezvous
from megatron_npu.adaptors.shared.start import announce_first, connect_old_tree
from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.base.replaced import Replaced
from megatron_npu.checkpoint_files import disks, stranger_weights
from megatron_npu.patching.registry import Recorder
from megatron_npu.process import deepspeed_device, extension_locks
from megatron_npu.safe_files.checkpoint_values import data_only

HIGHEST_STAGE_OF_A_PIPELINE = 1  # DeepSpeed 0.19.8, PipelineEngine.__init__

# --- start ------------------------------------------------------------------------------------------


def connect_start(recorder: Recorder) -> None:
    """Record the patches that an old checkout and DeepSpeed need at start-up.

    Args:
        recorder: the checkout's recorder.
    """
    connect_old_tree(recorder)
    recorder.around(
        "megatron.training:train_step", why="hook point for logging once which functions were patched"
    )(announce_first)
    recorder.around(
        "megatron.initialize:_initialize_distributed",
        why="DeepSpeed asks MPI for this process's rank unless a launcher has set it, counts CPU sockets as "
        "devices, compiles shared-memory communication for inference at the first start on a CPU, and "
        "waits forever for an interrupted compilation, such as that of --cpu-optimizer",
    )(meet)


def meet(original: Callable[..., None]) -> None:
    """Set the rank of a process without a launcher, and remove stale lock files of DeepSpeed's
    compilations.
    """
    rendezvous.provide_address()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    # how many devices DeepSpeed sees on a CPU: one for each process
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    deepspeed_device.compile_nothing()
    extension_locks.remove_stale("megatron_npu")  # other ranks compile nothing before they have met the first
    original()


# --- checkpoints ------------------------------------------------------------------------------------


_TAG = "latest"  # the tracker of DeepSpeed's engine: the name of a folder beside it
_REMEDY = (
    f"Write the iteration of an older checkpoint into {of_scripts.TRACKER}, or with --deepspeed its "
    f"name into {_TAG}."
)


def connect_checkpoints(recorder: Recorder, enumerations: Callable[[], Iterable[ModuleType]]) -> None:
    """Record the patches that make checkpoints private, write checksums, and load checkpoints without running
    code.

    This includes the checkpoints of DeepSpeed's engine.

    Args:
        recorder: the checkout's recorder.
        enumerations: a function that returns the modules of the enumerations to which saved arguments refer.
    """
    recorder.around("megatron.arguments:_add_checkpointing_args", why=of_scripts.WHY_VERIFY)(
        of_scripts.add_verify_flag
    )
    recorder.around(
        "megatron.checkpointing:get_checkpoint_tracker_filename",
        why="upstream marks a checkpoint as the newest before its checksums exist",
    )(of_scripts.tracker_to_write)

    @recorder.around(
        "megatron.checkpointing:load_checkpoint",
        why="current torch.load rejects argparse.Namespace, and upstream then exits with code 0; "
        "DeepSpeed's engine, and torch.load up to 2.5, execute any code in the file; files with flipped "
        "bits load silently",
    )
    @watchdog.phase("loading")
    def load_data_only(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
        """Load a checkpoint's tensors, numbers and arguments without executing code from it.

        An invalid file raises a one-line error.
        """
        from megatron import get_args

        given = get_args()
        called = inspect.signature(original).bind(*args, **kwargs).arguments
        root = getattr(given, called.get("load_arg", "load"))
        kinds = [kind for module in enumerations() for kind in vars(module).values()]
        named = [kind for kind in kinds if isinstance(kind, enum.EnumMeta)]
        place = _newest(given, root)
        of_scripts.require_same(root, place)
        compared = place if getattr(given, "verify_checkpoint", True) else None
        verifying = of_scripts.verifying(compared, _REMEDY)
        reading = data_only(root, *named, *deepspeed_device.harmless())
        with disks.whole(place), verifying, reading:
            iteration = original(*args, **kwargs)
        if place is not None:
            stranger_weights.tell_of_loaded(place, called["model"])
        return iteration

    recorder.around(
        "megatron.checkpointing:save_checkpoint",
        why="files get mode 640, folders mode 750, and checksums, and only then is the checkpoint marked as "
        "the newest",
    )(save_privately)


def _newest(given: argparse.Namespace, root: str) -> Path | None:
    """Return the checkpoint to load, or None if there is no tracker file that names one."""
    if not given.deepspeed:
        return of_scripts.to_load(root)
    # of DeepSpeed's ds_to_universal, beside the other
    universal = getattr(given, "universal_checkpoint", False)
    tracker = Path(root, f"{_TAG}_universal" if universal else _TAG)
    tag = getattr(given, "load_tag", None)  # deepspeedai's --load-tag
    if tag is None and tracker.is_file():
        tag = tracker.read_text(encoding="utf-8", errors="replace").strip()
    return Path(root, tag) if tag else None


@watchdog.phase(watchdog.SAVING)
def save_privately(
    original: Callable[..., None], iteration: int, model: Any, *args: Any, **kwargs: Any
) -> None:
    """Save a checkpoint in private files, and write checksums before the tracker names the checkpoint."""
    from megatron import get_args

    given = get_args()
    if given.save is None:
        return original(iteration, model, *args, **kwargs)
    verifies = getattr(given, "verify_checkpoint", True)
    mask = files.tighten_umask()
    try:
        with _tagged_afterwards(model[0], given.save) if given.deepspeed else contextlib.nullcontext() as tag:
            place = Path(given.save, tag) if tag else of_scripts.folder(given.save, iteration)
            with of_scripts.saving(given.save, place, verifies=verifies):
                original(iteration, model, *args, **kwargs)
    finally:
        os.umask(mask)


@contextlib.contextmanager
def _tagged_afterwards(engine: Any, root: str) -> Iterator[str]:
    """Yield the name of the folder into which the engine saves, and afterwards record this folder as the
    newest.
    """
    tag = f"global_step{engine.global_steps}"
    replaced = Replaced()  # the engine may have a method of its own, set by a program
    replaced.set(
        engine, "save_checkpoint", functools.partial(engine.save_checkpoint, tag=tag, save_latest=False)
    )
    try:
        yield tag
    finally:
        replaced.undo()
    if of_scripts.is_first():
        files.write(Path(root, _TAG), tag)
    disks.publish(Path(root, _TAG))


# --- what cannot work -------------------------------------------------------------------------------


def connect_refusals(recorder: Recorder, refuse: Callable[[argparse.Namespace], None]) -> None:
    """Record a patch that rejects unsupported options as soon as they are parsed.

    Args:
        recorder: the checkout's recorder.
        refuse: a function that raises a UsageError for options that cannot work.
    """

    @recorder.around(
        "megatron.arguments:parse_args",
        why="flag combinations that DeepSpeed or this tree does not support fail an assertion on every rank "
        "after the model is built",
        order=2,  # what this checkout is fixed of lies inside
    )
    def parse_and_refuse(original: Callable[..., argparse.Namespace], *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments, and reject those that would cause an error later in the run."""
        refuse_flags_of_other_trees(sys.argv[1:])
        parsed = original(*args, **kwargs)
        refuse(parsed)
        return parsed


# Flags that we add to the other Megatrons, and what does a similar thing here.
_OF_OTHER_TREES = {
    "--hccl-group-buffer-adaptive": "Set HCCL_BUFFSIZE, the buffer size of every group in MiB, instead.",
    "--swap-optimizer": "Set zero_optimization.offload_optimizer in DeepSpeed's configuration instead.",
    "--reuse-fp32-param": "Shard the optimizer states with --zero-stage 1 instead.",
    "--fine-grained-activation-offloading": "Recompute activations with --checkpoint-activations instead.",
    "--offload-modules": "Recompute activations with --checkpoint-activations instead.",
    "--cross-entropy-fusion-impl": "Remove it, because this tree's loss requires the full logits.",
}


def refuse_flags_of_other_trees(words: Sequence[str]) -> None:
    """Reject flags that this package adds only to other Megatron versions.

    Args:
        words: the words of the command line.

    Raises:
        UsageError: one of the words is such a flag.
    """
    for word in words:
        flag = word.partition("=")[0]
        if remedy := _OF_OTHER_TREES.get(flag):
            expected = "only Megatron-LM and megatron-core support it"
            raise UsageError(f"{flag} is not supported by Megatron-DeepSpeed; {expected}. {remedy}")


def refuse_configuration(args: argparse.Namespace, *, pipeline: bool, remedy: str) -> None:
    """Reject a configuration that DeepSpeed's engine does not support.

    Args:
        args: upstream's arguments, with ``--deepspeed``.
        pipeline: whether the model is a pipeline, for which DeepSpeed supports only ZeRO stages 0 and 1.
        remedy: the advice to give if the ZeRO stage is higher.

    Raises:
        UsageError: the configuration cannot be read, it sets a ZeRO stage that a pipeline does not support,
            or it enables fp16 on a CPU.
    """
    config = read_configuration(args.deepspeed_config)
    stage = zero_stage(args, config)
    if pipeline and stage > HIGHEST_STAGE_OF_A_PIPELINE:
        raise UsageError(
            f"ZeRO stage {stage} cannot be used with --deepspeed and a pipeline model: --zero-stage and the "
            f"stage in DeepSpeed's configuration must be 0 or {HIGHEST_STAGE_OF_A_PIPELINE}, because "
            f"DeepSpeed's pipeline engine shards only the optimizer states. {remedy}"
        )
    if (config.get("fp16") or {}).get("enabled") and devices.current().name == "cpu":
        raise UsageError(
            "fp16 cannot be used with --deepspeed on a CPU, because DeepSpeed does not support fp16 on "
            "CPUs. Train with --bf16, or remove --deepspeed, because Megatron-DeepSpeed's own fp16 works "
            "on CPUs."
        )


def zero_stage(args: argparse.Namespace, config: dict[str, Any]) -> int:
    """Return the ZeRO stage, which is the higher one of those in upstream's arguments and DeepSpeed's
    configuration.
    """
    return max(int(args.zero_stage), int((config.get("zero_optimization") or {}).get("stage", 0)))


def read_configuration(path: str | None) -> dict[str, Any]:
    """Read DeepSpeed's configuration from a JSON file.

    Raises:
        UsageError: the file does not exist or is not a JSON object.
    """
    expected, remedy = (
        "a file with a JSON object",
        "Pass DeepSpeed's configuration file with --deepspeed_config.",
    )
    if not path or not Path(path).is_file():
        raise UsageError(f"--deepspeed_config must be {expected}, but {path} does not exist. {remedy}")
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UsageError(f"--deepspeed_config {path} must be {expected}: {error}. {remedy}") from error
    if not isinstance(config, dict):
        raise UsageError(
            f"--deepspeed_config must be {expected}, but {path} contains a {type(config).__name__}. {remedy}"
        )
    return config
