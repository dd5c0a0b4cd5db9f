"""Runs of DeepSpeed's engine that are tried; as a program, ranks that try them in turn.

``deepspeed_stacks.py FOLDER DEVICE RANKS`` writes ``FOLDER/RANK.json``: the name of a run -> its losses, or
what went wrong. What they need is imported once, before the ranks are forked.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

STEPS = 6
STAGES = (0, 1, 2, 3)
OWN = {"type": "AdamW", "params": {"torch_adam": True, "lr": "auto", "weight_decay": "auto"}}
_EVERY = [{"zero_optimization": {"stage": stage}} for stage in STAGES]
# model, what the file says, switches
RUNS = [
    *(("bert", file, "") for file in _EVERY),
    ("bert", {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, ""),
    ("bert", {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}, "--mixed-precision bf16"),
    ("bert", {"zero_optimization": {"stage": 2}, "optimizer": OWN}, ""),
    ("bert", {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, ""),
    ("gpt2", {"zero_optimization": {"stage": 3}}, "--checkpoint-activations --fused-ops"),
    ("bert", {"zero_optimization": {"stage": 3}}, "--lora-rank 4"),
    # output layers that are put into the loss, with a bias and without
    *(("bert tokens", file, "--fused-ops") for file in _EVERY[1:]),
    *(("gpt2", file, "--fused-ops") for file in _EVERY[1:3]),
    ("bert tokens", {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, "--fused-ops"),
]
RESUMED = [("user", {"zero_optimization": {"stage": stage}}, "") for stage in STAGES]  # to the bit


def title(kind: str, file: dict, flags: str) -> str:
    """Return the name of a run."""
    return f"{kind} {json.dumps(file)} {flags}".strip()


def arguments_for(file: dict, flags: str, steps: int):
    """Return the flags of a run, as the command reads them, with the file written."""
    from megatron_npu.acceleration import arguments, ranks
    from tests.acceleration import training

    path = Path(tempfile.mkdtemp()) / "deepspeed.json"
    path.write_text(json.dumps(file))
    size = training.MICRO_BATCHES * training.BATCH
    line = (
        f"--user-script {__file__} --train-iters {steps} --lr {training.LR} --weight-decay {training.DECAY} "
        f"--clip-grad {training.CLIP} --micro-batch-size {training.BATCH} --global-batch-size {size} "
        f"--deepspeed-config {path} {flags}"
    )
    args = arguments.parse(line.split())
    arguments.set_ranks(args, ranks.of_this_process())
    return args


def prepared(kind: str, args, device):
    """Return the model in DeepSpeed's engine, with the weights that ``training.plain`` begins with."""
    from torch.optim.lr_scheduler import LinearLR

    from megatron_npu.acceleration import deepspeed_config, deepspeed_engine
    from megatron_npu.switches import Switches
    from tests.acceleration import training

    return deepspeed_engine.prepare(
        training.fresh(kind),
        None,
        partial(LinearLR, total_iters=args.train_iters),
        deepspeed_config.filled(args.deepspeed_config, args),
        Switches.from_args(args),
        args,
        device=device,
    )


def run(kind: str, file: dict, flags: str, device) -> list[float]:
    """Return the losses of a run."""
    from tests.acceleration import training

    made = prepared(kind, arguments_for(file, flags, STEPS), device)
    return training.train(made, training.data(kind, STEPS), device)


def resumed(kind: str, file: dict, flags: str, device, folder: Path) -> list[float]:
    """Return the losses of a run that another goes on with in the middle."""
    from tests.acceleration import training

    args, batches = arguments_for(file, flags, STEPS), training.data(kind, STEPS)
    made = prepared(kind, args, device)
    losses = training.train(made, batches[: STEPS // 2], device)
    made.save_beside(folder)
    made = prepared(kind, args, device)
    made.load_beside(folder)
    return losses + training.train(made, batches[STEPS // 2 :], device)


def attempts(device: str) -> Iterator[tuple[str, Callable[[], list[float]]]]:
    """Yield (name, what returns losses)."""
    import torch

    here = torch.device(device)
    for row in RUNS:
        yield title(*row), partial(run, *row, here)
    for number, row in enumerate(RESUMED):
        folder = Path(tempfile.gettempdir()) / f"resumed-{number}"
        yield f"resumed {title(*row)}", partial(resumed, *row, here, folder)
        yield f"whole {title(*row)}", partial(run, *row, here)


def main() -> int:
    """Import what is needed; return the worst of the ranks' results."""
    import peft  # noqa: F401
    import transformers.integrations.deepspeed  # noqa: F401

    from megatron_npu.acceleration import deepspeed_engine
    from tests.acceleration import stacks
    from tests.acceleration.models import KINDS

    deepspeed_engine.load()
    for kind in KINDS.values():
        kind.model()
    return stacks.fork(int(sys.argv[3]), Path(sys.argv[1]), sys.argv[2], attempts)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
