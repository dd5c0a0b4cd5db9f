"""``megatron.arguments``: what DeepSpeed or the tree refuses with a traceback of every rank, in one line.

The tree's model is a pipeline with ``--deepspeed``, and DeepSpeed's engine for pipelines shards at stages 0
and 1 alone (DeepSpeed 0.19.8, ``PipelineEngine.__init__``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_npu import devices
from megatron_npu.adaptors.megatron_deepspeed.decorators import around
from megatron_npu.errors import UsageError

_HIGHEST_STAGE = 1


@around(
    "megatron.arguments:parse_args",
    why="what DeepSpeed or this tree does not do with these flags is an assertion of every rank, after the "
    "model is built",
)
def parse_and_refuse(original: Callable[..., argparse.Namespace], *args: Any, **kwargs: Any) -> Any:
    """Parse; refuse what would fail later."""
    parsed = original(*args, **kwargs)
    refuse(parsed)
    return parsed


def refuse(args: argparse.Namespace) -> None:
    """Refuse options that cannot work.

    Raises:
        UsageError: ``--cpu-optimizer``; with ``--deepspeed``: no configuration that can be read, a stage of
            ZeRO above 1, fp16 on a CPU.
    """
    if args.cpu_optimizer:
        raise UsageError(
            "--cpu-optimizer, which this tree declares and does not have",
            "an optimizer on the device, or one that DeepSpeed offloads",
            'Leave it out; for DeepSpeed: "offload_optimizer": {"device": "cpu"} and '
            '"zero_force_ds_cpu_optimizer": false in its configuration.',
        )
    if args.deepspeed:
        _refuse_configuration(args)


def _refuse_configuration(args: argparse.Namespace) -> None:
    config = _read(args.deepspeed_config)
    stage = max(int(args.zero_stage), int((config.get("zero_optimization") or {}).get("stage", 0)))
    if stage > _HIGHEST_STAGE:
        raise UsageError(
            f"ZeRO stage {stage} with --deepspeed, whose model is a pipeline here",
            f"--zero-stage 0 or {_HIGHEST_STAGE}, in the configuration, too: DeepSpeed's engine for "
            "pipelines shards the optimizer's state alone",
            "Take stage 1; gradients and weights are sharded by megatron-npu train --deepspeed-config.",
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
