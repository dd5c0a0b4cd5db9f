"""Run a stock script with nothing replaced but what keeps it from running at all.

Usage: baseline.py SCRIPT ARGUMENTS...

The operations (attention, cross-entropy, GELU, embedding, softmax, bias and dropout) are upstream's own
functions here. What stays: stand-ins, the redirection of torch.cuda, layer norm (a CUDA kernel upstream)
and the repairs of start, random states and checkpoints.
"""

from __future__ import annotations

import sys

from megatron_npu import adaptors
from megatron_npu.commands import run
from megatron_npu.patching.registry import registry

OPERATIONS = (
    "megatron.core.tensor_parallel.cross_entropy",
    "megatron.core.tensor_parallel.layers",
    "megatron.model.fused_bias_gelu",
    "megatron.model.fused_softmax",
    "megatron.model.gpt_model",
    "megatron.model.module",
    "megatron.model.transformer",
)


def main() -> None:
    adaptors.register("megatron_lm")
    registry.keep(lambda patch: patch.module not in OPERATIONS)
    sys.exit(run.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
