"""Where the time of a training step goes, with Megatron's own code and with this project.

    python benchmarks/step_profile.py --model demo --dtype bf16

Both take their steps in turn (``turns.py``), under torch's profiler. Each operation's self time is attributed
to the subject that its name, or its caller's name, indicates. A kernel of ours counts for the function that
called it; matmuls show their names, including those fused with exponentials. The rest of a step is Python,
waiting, and the profiler itself. Needs the extra core. Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from typing import Any

import report
import train
import turns

VARIANTS = ("redirection", "project")
# What a name tells, asked from the operation up to what has called it; the first that matches counts.
SUBJECTS = {
    "attention": r"scaled_dot_product|_Blockwise|Softmax|softmax|aten::b?addbmm|aten::bmm",
    "matrix products": r"megatron_npu::|aten::(add)?mm_?$|mkldnn::_linear|aten::linear|aten::matmul",
    "loss": r"CrossEntropy",
    "optimizer": r"Optimizer\.step|_fused_adam|non_finite|linalg_vector_norm|multi_tensor|foreach",
    "norms": r"layer_norm|Norm(Backward)?$|LayerNorm|rsqrt",
    "GELU": r"[Gg]e[Ll]u|aten::(tanh|erf)",
    "dropout, bias, residual": r"[Dd]ropout|aten::add(_|$)|AddBackward",
    "embedding": r"[Ee]mbedding",
    "sums of gradients": r"aten::sum|Accumul",
    "casts and copies": r"aten::(copy_|_to_copy|to|cat|clone|contiguous|fill_|zero_)$",
}
OTHERS = "other operations"


def main() -> None:
    """Profile both variants, or run one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=train.MODELS, default="demo")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--seq-length", type=int)
    parser.add_argument(
        "--steps",
        type=int,
        default=6,
        help="number of counted steps of each variant; the variants take turns",
    )
    parser.add_argument("--variant", choices=VARIANTS, help="run only this variant")
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(profile(arguments)))
        return
    programs = [turns.Program(name, command_of(name, arguments), before=train.WARM_UP) for name in VARIANTS]
    turns.measure(programs, arguments.steps)
    write(arguments, programs)


def command_of(variant: str, arguments: argparse.Namespace) -> list[str]:
    """Return the command that runs a variant."""
    command = [sys.executable, __file__, "--variant", variant, "--model", arguments.model]
    command += ["--dtype", arguments.dtype, "--steps", str(arguments.steps)]
    return command + (["--seq-length", str(arguments.seq_length)] if arguments.seq_length else [])


def profile(arguments: argparse.Namespace) -> dict[str, float]:
    """Train, each step in its turn; return the milliseconds of each subject per step."""
    import torch

    turn = turns.Turn()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    taken = 0

    def take(*_: object) -> None:
        nonlocal taken
        taken += 1
        if taken == train.WARM_UP + arguments.steps:
            profiler.stop()
        turn.take()
        if taken == train.WARM_UP:
            profiler.start()

    if arguments.variant == "redirection":
        train.only_redirect()
    train.trained(train.shape_of(arguments), arguments, train.WARM_UP + arguments.steps, on_step=take)
    found: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        found[subject_of(event)] += event.self_cpu_time_total / 1e3 / arguments.steps
    return dict(found)


def subject_of(event: Any) -> str:
    """Return the subject of an event from torch's profiler."""
    while event is not None:
        for subject, pattern in SUBJECTS.items():
            if re.search(pattern, event.name):
                return subject
        event = event.cpu_parent
    return OTHERS


def write(arguments: argparse.Namespace, programs: list[turns.Program]) -> None:
    """Print and write the milliseconds of each subject."""
    from megatron_npu.upstream import megatrons

    found = {
        one.name: {
            **one.said,
            "step": statistics.median(one.seconds) * 1e3,
            "operations": sum(one.said.values()),
        }
        for one in programs
    }
    for subject in (*SUBJECTS, OTHERS, "operations", "step"):
        row = "".join(f"{found[name].get(subject, 0.0):12.1f}" for name in VARIANTS)
        print(f"{subject:<26}{row} ms")
    results = {
        "model": {"name": arguments.model, **train.shape_of(arguments)},
        "dtype": arguments.dtype,
        "milliseconds": found,
    }
    length = f"-{arguments.seq_length}-tokens" if arguments.seq_length else ""
    path = report.RESULTS / f"profile-{arguments.model}-{arguments.dtype}{length}-cpu.json"
    report.write(path, results, megatron_core=megatrons.find().version)


if __name__ == "__main__":
    main()
