"""The file of ``--deepspeed-config``: its "auto" values come from the flags, and the others agree with them.

The rules are those of Transformers' Trainer, whose code fills in the values.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_npu.errors import UsageError
from megatron_npu.switches import NO_FILE

Config = dict[str, Any]

_STAGES = (0, 1, 2, 3)
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# what Transformers calls it -> how it is typed here
_FLAGS = {
    "per_device_train_batch_size": "--micro-batch-size",
    "gradient_accumulation_steps": "--global-batch-size over micro-batches and ranks",
    "train_batch_size (calculated)": "--global-batch-size",
    "max_grad_norm": "--clip-grad",
    "learning_rate": "--lr",
    "adam_beta1+adam_beta2": "--adam-beta1 and --adam-beta2",
    "adam_epsilon": "--adam-eps",
    "weight_decay": "--weight-decay",
    "fp16|fp16_full_eval": "--mixed-precision",
    "bf16|bf16_full_eval": "--mixed-precision",
    "num_training_steps (calculated)": "--train-iters, or the iterations of --epochs",
    "warmup_steps": "--lr-warmup-iters",
}
_ELSEWHERE = {
    "pipeline": "Stages are Megatron's: --pipeline-model-parallel-size with a PreTrainer.",
    "tensor_parallel": "Layers are cut by Megatron: --tensor-model-parallel-size with a PreTrainer.",
    "amp": "Use bf16 or fp16 in the file, or --mixed-precision.",
    "elasticity": "Give the batch sizes.",
    "autotuning": "Try sizes with `megatron-npu bench`.",
    "nebula": "Checkpoints are written by this project, with checksums.",
    "datastates_ckpt": "Checkpoints are written by this project, with checksums.",
}
_OF_CHECKPOINTS = ("writer", "load_universal")  # a process that writes when a save has ended; another format


def read(path: Path) -> Config:
    """Return what the file holds, after a look at what this project relies on.

    Raises:
        UsageError: it cannot be read, is no JSON object, or asks for what is not done here.
    """
    if path == NO_FILE:
        raise UsageError("--deepspeed without a file", "--deepspeed-config FILE", "Name the file.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(path, str(error.strerror), "a file that can be read", "Correct the path.") from error
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"no JSON ({error})", "a JSON object", "Correct the file.") from error
    if not isinstance(config, dict):
        raise _wrong(path, f"it holds a {type(config).__name__}", "a JSON object", "Correct the file.")
    _refuse_kinds(path, config)
    for name, remedy in _ELSEWHERE.items():
        if _enabled(config.get(name)):
            raise _wrong(path, f'"{name}"', "a file without it", remedy)
    for name in _OF_CHECKPOINTS:
        if _enabled(config.get("checkpoint", {}).get(name)):
            remedy = "Checkpoints are written and read as a whole, with checksums."
            raise _wrong(path, f'"checkpoint.{name}"', "a file without it", remedy)
    return config


def precision_of(config: Config, flag: str | None) -> str | None:
    """Return ``bf16``, ``fp16`` or None: what the flag says, else the file."""
    said = [name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is True]
    return flag or (said[0] if said else None)


def stage_of(config: Config) -> int:
    """Return ZeRO's stage; 0: nothing is shared out."""
    return int(config.get("zero_optimization", {}).get("stage", 0))


def filled(path: Path, args: Namespace) -> Any:
    """Return the file's values with what the flags say, as Transformers' ``HfTrainerDeepSpeedConfig``.

    Args:
        path: the file.
        args: the flags, with ranks (``arguments.set_ranks``).

    Raises:
        UsageError: as ``read``; a value that contradicts a flag.
    """
    from transformers.integrations import deepspeed as transformers_deepspeed

    class Filled(transformers_deepspeed.HfTrainerDeepSpeedConfig):  # type: ignore[misc]
        """Says of a contradiction where it is."""

        def fill_match(
            self, ds_key_long: str, hf_val: Any, hf_key: str | None = None, must_match: bool = True
        ) -> None:
            """Put the flag's value in the place of "auto"."""
            before = len(self.mismatches)
            super().fill_match(ds_key_long, hf_val, hf_key, must_match)
            if len(self.mismatches) > before:
                given = f"{ds_key_long} {json.dumps(self.get_value(ds_key_long))}"
                flag = f"{_FLAGS.get(str(hf_key), hf_key)} {json.dumps(hf_val)}"
                raise _wrong(path, f"{given}, and {flag}", 'the same, or "auto"', "Change one of the two.")

    config = read(path)
    precision = precision_of(config, args.mixed_precision)
    if precision_of(config, None) not in (None, precision):
        given = f"{precision_of(config, None)}.enabled, and --mixed-precision {precision}"
        raise _wrong(path, given, "the same", "Change one of the two.")
    for name in (*_BATCH, "gradient_clipping"):
        config.setdefault(name, "auto")
    if precision:
        config.setdefault(precision, {}).setdefault("enabled", "auto")
    result = Filled(config)
    # what is alive there lets from_pretrained draw new weights on rank 0 alone: other ones than without
    transformers_deepspeed.unset_hf_deepspeed_config()
    result.trainer_config_process(_as_transformers_names_them(args, precision))
    return result


def finished(config: Any, args: Namespace, model: Any) -> Config:
    """Return the values for ``deepspeed.initialize``, now that the model and the iterations are known.

    Raises:
        UsageError: an "auto" that nothing here fills in; a value that contradicts a flag.
    """
    path = args.deepspeed_config
    try:
        config.trainer_config_finalize(_as_transformers_names_them(args, None), model, args.train_iters or 0)
    except ValueError as error:
        raise _wrong(path, str(error), "numbers in their place", "Write them into the file.") from error
    left = _autos(config.config)
    if left:
        raise _wrong(path, f'{left[0]} "auto"', "a value: no flag says it", "Write it into the file.")
    return dict(config.config)


def _as_transformers_names_them(args: Namespace, precision: str | None) -> SimpleNamespace:
    from megatron_npu.acceleration import schedule

    return SimpleNamespace(
        world_size=args.world_size,
        per_device_train_batch_size=args.micro_batch_size,
        gradient_accumulation_steps=args.num_microbatches,
        max_grad_norm=args.clip_grad,
        learning_rate=args.lr,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_epsilon=args.adam_eps,
        weight_decay=args.weight_decay,
        save_on_each_node=False,
        fp16=precision == "fp16",
        fp16_full_eval=False,
        bf16=precision == "bf16",
        bf16_full_eval=False,
        get_warmup_steps=lambda iterations: schedule.warmup_iterations(args),
    )


def _refuse_kinds(path: Path, config: Config) -> None:
    for name in ("zero_optimization", "bf16", "fp16", "optimizer", "scheduler"):
        value = config.get(name, {})
        if not isinstance(value, dict):
            raise _wrong(path, f"{name} {json.dumps(value)}", "an object", "Correct the file.")
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if type(stage) is not int or stage not in _STAGES:
        raise _wrong(
            path, f"zero_optimization.stage {json.dumps(stage)}", "0, 1, 2 or 3", "Correct the file."
        )
    if all(config.get(name, {}).get("enabled") is True for name in ("bf16", "fp16")):
        raise _wrong(path, "bf16 and fp16", "one of them enabled", "Leave one out.")
    for name in ("offload_optimizer", "offload_param"):
        if (config.get("zero_optimization", {}).get(name) or {}).get("device") == "nvme":
            raise _wrong(
                path,
                f"zero_optimization.{name}.device nvme",
                "cpu or none: reading from disks is compiled code that was never tried here",
                "Offload to the host's memory.",
            )


def _enabled(section: Any) -> bool:
    return section.get("enabled", True) is not False if isinstance(section, dict) else bool(section)


def _autos(config: Config, prefix: str = "") -> list[str]:
    found = []
    for name, value in config.items():
        if value == "auto":
            found.append(f"{prefix}{name}")
        elif isinstance(value, dict):
            found += _autos(value, f"{prefix}{name}.")
    return found


def _wrong(path: Path, given: str, expected: str, remedy: str) -> UsageError:
    reason = " ".join(given.split())
    return UsageError(f"--deepspeed-config {path}: {reason}", expected, remedy)
