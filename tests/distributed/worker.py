"""One rank of a run: trains with the driver and writes the norms of the first layer's first gradients.

Usage: worker.py NORMS.json FLAGS...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from megatron_npu.training import arguments, pretrain


def first_layer_norms(chunks: list) -> dict[str, float]:
    """Return the gradient norm of each parameter of layer 0, whole over the tensor-parallel ranks."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    norms = {}
    for name, parameter in chunks[0].named_parameters():
        if ".layers.0." not in name:
            continue
        square = parameter.main_grad.double().square().sum()
        if getattr(parameter, "tensor_model_parallel", False):
            torch.distributed.all_reduce(square, group=group)
        norms[name.partition("decoder.")[2]] = square.sqrt().item()
    return norms


def main() -> None:
    output, flags = Path(sys.argv[1]), sys.argv[2:]

    def keep(iteration: int, chunks: list) -> None:
        if iteration == 1:
            norms = first_layer_norms(chunks)
            if torch.distributed.get_rank() == 0:
                output.write_text(json.dumps(norms))

    pretrain.train(arguments.parse(flags), on_gradients=keep)


if __name__ == "__main__":
    main()
