"""Runs ranks on fake CUDA: python -m tests.fake_cuda.ranks CASES.json FOLDER, with a Megatron on the path.

CASES is a list of {name, rank, ranks, received, words}: vectors that broadcasts bring, and the words
behind ``megatron-npu``, or ``OPERATIONS``. Each runs in a fork of a
process that has imported torch; its report is FOLDER/NAME.json, what it prints FOLDER/NAME.log.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from megatron_npu.planning.fake_cuda import library

if __name__ == "__main__":
    library.load()

from megatron_npu import plugin
from megatron_npu.commands import cli
from megatron_npu.doctor import operations
from megatron_npu.ops import dispatch
from megatron_npu.planning.fake_cuda import machine
from tests.fake_cuda.observer import Observer

OPERATIONS = ["operations"]  # the words of the case that calls each operation


def run(case: dict, folder: Path) -> None:
    """Run a case in this process; write its report."""
    observer = Observer()
    observer.watch()
    os.chdir(folder)
    received = {len(numbers): numbers for numbers in case["received"]}
    with machine.running(case["rank"], case["ranks"], received) as tensors:
        plugin.install()
        code = _operations() if case["words"] == OPERATIONS else cli.main(case["words"])
    ledger = plugin.engine().ledger
    report = {
        "exit_code": code,
        "ledger": ledger.summary(),
        "operations": sorted(name for name, bound in _bound().items() if bound == "cuda"),
        "fallbacks": [f"{name}: {reason}" for name, reason in dispatch.fallbacks],
        "aten_operations": sum(tensors.operations.values()),
        "modules": dict(sorted(observer.forwards.items())),
        "gradients": observer.backwards,
        "optimizer_steps": observer.steps,
        "elements_updated": observer.stepped,
    }
    (folder / f"{case['name']}.json").write_text(json.dumps(report, indent=1))


def _operations() -> int:
    """Make the doctor's call of each operation in each dtype, forward and backward; return how many fail."""
    failed = 0
    for dtype in dispatch.KERNEL_DTYPES:
        for name, why in operations.run(dtype).items():
            print(f"{name} in {dtype}: {why}")
            failed += 1
    return failed


def _bound() -> dict[str, str]:
    """Return the operations that have been called, and the device whose implementation they were given."""
    device = {True: "cuda", False: "reference"}
    return {
        operation.name: device["cuda" in operation.implementations]
        for operation in dispatch.OPERATIONS
        if operation._bound != operation._bind_and_call
    }


def _forked(case: dict, folder: Path) -> None:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    log = os.open(folder / f"{case['name']}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        run(case, folder)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what a test has imported must not clean up in a fork


if __name__ == "__main__":
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]).resolve()
    with machine.installed():
        for each in cases:
            _forked(each, folder)
