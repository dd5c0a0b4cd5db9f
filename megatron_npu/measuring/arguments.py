"""Declare the flags of ``megatron-npu bench``."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_npu.base.arg_parser import Number, Parser, byte_size, positive, seed
from megatron_npu.measuring.schemes import SUITES

at_least_two = Number("an integer of at least 2", int, 2)


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    result = Parser(
        "megatron-npu bench",
        description=(
            "Measure the throughput and memory use of each acceleration on this machine, as in four tables "
            "of the PAI-Rapidformer document."
        ),
    )
    add = result.add_argument
    add("--suite", required=True, choices=list(SUITES), help="benchmark suite to run")
    add(
        "--model",
        metavar="SIZE",
        help=(
            "model to measure: bert-tiny, bert-base, bert-large, gpt-tiny, gpt-124m, gpt-1.3b, or "
            "LAYERSxHIDDEN[xHEADS] (default: the model of the published table, or the smallest one on a CPU "
            "or a simulated NPU)"
        ),
    )
    add(
        "--devices",
        type=positive,
        help=(
            "number of ranks, one per device (default: 4 as in the published table, or as many as this "
            "machine has if it has fewer)"
        ),
    )
    add("--steps", type=positive, default=20, help="number of steps in one timed repetition")
    add(
        "--repeat",
        type=positive,
        default=5,
        help="number of repetitions, over which the mean and the deviation are computed",
    )
    add(
        "--micro-batch-size",
        type=positive,
        help=(
            "number of samples per rank and forward pass (default: as in the published table, or 1 or 4 "
            "on a CPU)"
        ),
    )
    add(
        "--global-batch-size",
        type=positive,
        help="number of samples per step over all ranks (default: micro batch x devices)",
    )
    add("--seq-length", type=at_least_two, help="number of tokens per sample (default: that of the model)")
    add(
        "--vocab-size", type=at_least_two, help="number of rows in the embedding (default: that of the model)"
    )
    add(
        "--mixed-precision",
        choices=["bf16", "fp16"],
        default="bf16",
        help="16-bit format in which the mixed-precision rows are measured",
    )
    add(
        "--memory-limit",
        type=byte_size,
        metavar="BYTES",
        help=(
            "memory limit per rank, such as 32G; exceeding it counts as OOM (default: the device's "
            "memory, or, on a CPU, four fifths of the available memory divided by the number of ranks)"
        ),
    )
    add("--seed", type=seed, default=1234, help="random seed for weights, tokens and dropout")
    add("--json", type=Path, metavar="FILE", help="write all measurements to FILE as JSON")
    add("--markdown", type=Path, metavar="FILE", help="write the tables to FILE as Markdown")
    add("--plot", type=Path, metavar="FILE", help="plot throughput and memory to a PNG file")
    return result
