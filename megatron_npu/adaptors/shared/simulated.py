"""Mark runs on a simulated device wherever their logs could be mistaken for hardware results."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_npu import devices
from megatron_npu.patching.registry import Recorder

WHY_LINE = "its TFLOP/s and milliseconds would be read as those of an NPU"
WHY_BOARD = "TensorBoard names a run by its folder, and would show the times as those of an NPU"


def connect_old_tree(recorder: Recorder, line: str) -> None:
    """Record both patches for a tree with ``megatron/global_vars.py``.

    Args:
        recorder: the checkout's recorder.
        line: the function that prints the lines of measurements.
    """
    recorder.around(line, devices=("npu",), condition=on_hardware, why=WHY_LINE)(mark_line)
    recorder.around(
        "megatron.global_vars:_set_tensorboard_writer",
        devices=("npu",),
        condition=on_hardware,
        why=WHY_BOARD,
    )(mark_board)


def on_hardware() -> str | None:
    """Return why these patches are not needed on this device, or None."""
    return None if devices.current().simulated else "the device is hardware"


def mark_line(original: Callable[..., Any], message: str) -> Any:
    """Name the device at the end of every line of measurements."""
    line = str(message)
    return original(f"{line} {devices.current().title} |" if line.rstrip().endswith("|") else message)


def mark_board(original: Callable[..., Any], args: argparse.Namespace) -> Any:
    """Write the curves into a folder that names the device; other files stay where they belong."""
    if getattr(args, "tensorboard_dir", None):
        args = argparse.Namespace(**vars(args))
        args.tensorboard_dir = devices.board_folder(args.tensorboard_dir)
    return original(args)
