"""One rank of several runs of the driver, one after the other, as ``curves.train`` starts them.

Usage: worker.py CASES.json FOLDER FLAGS..., with CASES {name: [flag, ...]}. Each run logs into
FOLDER/NAME.jsonl; rank 0 notes in FOLDER/NAME.json how many parameters there are and the norms of the first
layer's first gradients.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from megatron_npu import devices, plugin
from megatron_npu.pretrain.flags import arguments
from megatron_npu.pretrain.run import initialize, pretrain


def first_layer_norms(chunks: list) -> dict[str, float]:
    """Return the gradient norm of each parameter of layer 0, whole over the tensor-parallel ranks."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    norms = {}
    for name, parameter in chunks[0].named_parameters():
        gradient = getattr(parameter, "main_grad", None)  # torch's FSDP has none
        if ".layers.0." not in name or gradient is None:
            continue
        square = gradient.double().square().sum()
        if getattr(parameter, "tensor_model_parallel", False):
            dist.all_reduce(square, group=group)
        norms[name.partition("decoder.")[2] or name] = square.sqrt().item()  # or of a further layer
    return norms


def train(flags: list[str], place: Path) -> None:
    """Train once; the files are called ``place`` and a suffix."""
    norms: dict[str, float] = {}

    def keep(iteration: int, chunks: list) -> None:
        if iteration == 1:
            norms.update(first_layer_norms(chunks))

    args = arguments.parse(["--json-log", str(place.with_suffix(".jsonl")), *flags])
    summary = pretrain.train(args, on_gradients=keep)
    if os.environ.get("RANK", "0") == "0":
        names = ("parameters", "parameters_without_embeddings", "active_parameters")
        sizes = {name: getattr(summary, name) for name in names}
        place.with_suffix(".json").write_text(json.dumps({"sizes": sizes, "first_layer": norms}))


def main() -> None:
    cases, folder, flags = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3:]
    plugin.install()
    if "RANK" in os.environ:  # one group for all of them
        devices.current().set_current(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(devices.current().backend)
    initialize.silence_known_warnings()
    for name, words in cases.items():
        print(f"-- {name}", flush=True)
        train([*flags, *words], folder / name)


if __name__ == "__main__":
    main()
