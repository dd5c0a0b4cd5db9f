"""Mark runs on simulated devices in logs that could otherwise be mistaken for results on hardware."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_npu import devices
from megatron_npu.patching.registry import Recorder

WHY_LINE = "the simulator's TFLOP/s and milliseconds could be mistaken for an NPU's"
WHY_BOARD = (
    "TensorBoard names a run by its folder, and the times of a simulated run could be mistaken for an NPU's"
)


def connect_old_tree(recorder: Recorder, line: str) -> None:
    """Record the patches of this module for a checkout with ``megatron/global_vars.py``.

    Args:
        recorder: the checkout's recorder.
        line: the name of the function that prints lines of measurements.
    """
    recorder.around(line, devices=("npu",), condition=on_hardware, why=WHY_LINE)(mark_line)
    recorder.around(
        "megatron.global_vars:_set_tensorboard_writer",
        devices=("npu",),
        condition=on_hardware,
        why=WHY_BOARD,
    )(mark_board)


def on_hardware() -> str | None:
    """Return the reason why runs on this device need not be marked as simulated, or None."""
    return None if devices.current().simulated else "the device is hardware"


def mark_line(original: Callable[..., Any], message: str) -> Any:
    """Append the device's name to every log line that contains measurements."""
    line = str(message)
    return original(f"{line} {devices.current().title} |" if line.rstrip().endswith("|") else message)


def mark_board(original: Callable[..., Any], args: argparse.Namespace) -> Any:
    """Write TensorBoard curves to a folder that names the device, leaving existing files unchanged."""
    if getattr(args, "tensorboard_dir", None):
        args = argparse.Namespace(**vars(args))
        args.tensorboard_dir = devices.board_folder(args.tensorboard_dir)
    return original(args)
