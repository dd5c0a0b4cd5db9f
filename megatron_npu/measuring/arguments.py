"""The flags of ``megatron-npu bench``."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_npu.base.arg_parser import Number, Parser, byte_size, positive, seed
from megatron_npu.measuring.schemes import SUITES

at_least_two = Number("a whole number from 2 on", int, 2)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    result = Parser("megatron-npu bench", description=__doc__)
    add = result.add_argument
    add("--suite", required=True, choices=list(SUITES), help="which of the four tables")
    add(
        "--model",
        metavar="SIZE",
        help="bert-tiny, bert-base, bert-large, gpt-tiny, gpt-124m, gpt-1.3b, or LAYERSxHIDDEN[xHEADS] "
        "(default: the document's own, on a CPU or a simulated NPU the smallest)",
    )
    add(
        "--devices",
        type=positive,
        help="ranks, one for each device (default: 4 as the document, or as many as there are)",
    )
    add("--steps", type=positive, default=20, help="steps that are timed together")
    add("--repeat", type=positive, default=5, help="how many times: mean and deviation are over these")
    add(
        "--micro-batch-size",
        type=positive,
        help="samples of a forward pass (default: the document's, on a CPU 1 or 4)",
    )
    add("--global-batch-size", type=positive, help="samples of a step (default: micro batch x devices)")
    add("--seq-length", type=at_least_two, help="tokens of a sample (default: the model's)")
    add("--vocab-size", type=at_least_two, help="rows of the embedding (default: the model's)")
    add("--mixed-precision", choices=["bf16", "fp16"], default="bf16", help="what mixed means")
    add(
        "--memory-limit",
        type=byte_size,
        metavar="BYTES",
        help="what a rank may have, such as 32G; more is OOM (default: what the device has; on a CPU four "
        "fifths of what is available, shared by the ranks)",
    )
    add("--seed", type=seed, default=1234, help="of weights, tokens and dropout")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    add("--markdown", type=Path, metavar="FILE", help="write the tables")
    add("--plot", type=Path, metavar="FILE", help="draw throughput and memory, as PNG")
    return result
