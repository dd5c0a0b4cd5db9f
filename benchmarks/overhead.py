"""The cost of the plug-in's own Python code in a training step: instructions counted, not time.

    MEGATRON_NPU_DEVICE=cpu python benchmarks/overhead.py    # megatron-core, a GPT of two layers

It counts the bytecode instructions that Python executes in functions of ``megatron_npu`` in one step
(forward, backward, gradient reduction, optimizer): adaptors, dispatch, the redirection of torch.cuda, and the
Python code of operations. The count does not depend on other load on the machine. The cost of an instruction
is the CPU time of a loop of similar code (attributes, calls, branches) divided by its instructions; the
fraction refers to the CPU time of the step, the minimum of several. Results go to
benchmarks/results/overhead-cpu.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import report
from launches import Training, prepare_megatron_core  # the benchmark beside this one

ROOT = str(Path(__file__).resolve().parent.parent / "megatron_npu")
LAYERS, STEPS = 2, 5
SHAPES = ((256, 128), (512, 256))  # hidden size, tokens


def instructions(run: Callable[[], Any], below: str = ROOT) -> Counter[str]:
    """Return the bytecode instructions that ``run`` executes per file in a folder, in this thread.

    On a CPU the backward pass runs in the thread that calls it.
    """
    counts: Counter[str] = Counter()

    def inside(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            counts[frame.f_code.co_filename] += 1
        return inside

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(below):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return inside

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(before)
    return counts


def step(training: Training) -> None:
    """Train one step."""
    for forget in training.forget:
        forget()
    training.loss().backward()
    training.reduce()
    training.update()


class _Sample:
    """Run code similar to that of adaptors: arguments, attributes, a branch, a call."""

    def __init__(self) -> None:
        self.options = {"scale": 1.0}
        self.ready = True

    def choose(self, first: Any, second: Any = None, **others: Any) -> Any:
        if second is None and self.ready:
            return self.options.get("scale"), first
        return others

    def call(self, count: int) -> None:
        for number in range(count):
            self.choose(number, kind=number)


def nanoseconds_of_an_instruction(count: int = 200_000) -> float:
    """Return the CPU time per bytecode instruction, the minimum of several measurements."""
    sample = _Sample()
    executed = instructions(lambda: sample.call(100), __file__).total() / 100
    return min(processor_time(lambda: sample.call(count)) for _ in range(STEPS)) / count / executed * 1e9


def processor_time(run: Callable[[], Any]) -> float:
    """Return the CPU seconds of this process, over all its threads."""
    began = time.process_time()
    run()
    return time.process_time() - began


def measure(hidden: int, sequence: int) -> dict[str, Any]:
    """Return counts, times and the fraction for a GPT of two layers in bf16."""
    training = prepare_megatron_core("gpt", LAYERS, sequence, hidden_size=hidden)
    for _ in range(2):
        step(training)
    counts = instructions(lambda: step(training))
    each = nanoseconds_of_an_instruction()
    seconds = min(processor_time(lambda: step(training)) for _ in range(STEPS))
    rooms: Counter[str] = Counter()
    for file, number in counts.items():
        rooms[Path(file).relative_to(ROOT).parts[0]] += number
    return {
        "layers": LAYERS,
        "hidden_size": hidden,
        "sequence": sequence,
        "instructions": counts.total(),
        "instructions_by_room": dict(rooms.most_common()),
        "nanoseconds_of_an_instruction": round(each, 1),
        "step_processor_seconds": round(seconds, 5),
        "share": round(counts.total() * each * 1e-9 / seconds, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-record", action="store_true", help="print the results without recording them")
    options = parser.parse_args()
    import megatron_npu

    megatron_npu.install()
    import torch
    from megatron.core import package_info

    torch.set_num_threads(1)  # threads that wait would count as computing
    found = [measure(*shape) for shape in SHAPES]
    for one in found:
        print(f"{one['hidden_size']} x {one['sequence']}: {one['instructions']} instructions, ", end="")
        print(f"{100 * one['share']:.2f} % of the step's processor time")
    if not options.no_record:
        versions = {"megatron": package_info.__version__}
        report.write(report.RESULTS / "overhead-cpu.json", {"steps": found}, **versions)


if __name__ == "__main__":
    main()
