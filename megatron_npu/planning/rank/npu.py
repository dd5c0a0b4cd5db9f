"""Run one rank on the simulated NPU in dry mode: ``python -m megatron_npu.planning.rank.npu SPECIFICATION``.

The process runs in the environment of ``sim.launcher.prepare`` and writes its result to the file that the
specification names. The process runs the program in the same way as ``megatron-npu pretrain`` or
``megatron-npu run``.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_npu.base import files
from megatron_npu.planning import timeline


def main(path: str) -> int:
    """Run a rank as a specification file describes.

    Return 0 if it has trained.
    """
    begin = time.monotonic()
    specification = json.loads(Path(path).read_text(encoding="utf-8"))
    import torch
    import torch_npu  # noqa: F401  (registers torch.npu)

    from megatron_npu.commands import cli
    from megatron_npu.planning.rank import before_training, measurements, program_lines

    report: dict[str, Any] = {"rank": int(os.environ["RANK"]), "code": None, "error": None}
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))  # type: ignore[attr-defined]
    _record(specification)
    noting = measurements.taken("npu", _peak, lambda tensor: tensor.untyped_storage().data_ptr())
    with noting as noted, _around(specification, report):
        asked = _tell_of_asked(noted)
        try:
            report["code"] = cli.main(specification["words"])
        except SystemExit as end:
            report["code"] = end.code if isinstance(end.code, int) else int(end.code is not None)
        except before_training.ReadyError:
            report["ready"] = True
        except torch.OutOfMemoryError as error:
            report["error"], report["out_of_memory"] = str(error).partition("\n")[0], True
            report["asked_by"] = program_lines.failing_line(error)
        except BaseException as error:
            traceback.print_exc()
            report["error"] = f"{type(error).__name__}: {str(error)[:400]}"
    del asked
    if specification.get("curve"):
        snapshot = torch.npu.memory._snapshot()  # type: ignore[attr-defined]
        timeline.keep(snapshot, noted.addresses, report, specification.get("snapshot"))
    report |= _memory() | vars(noted)
    report.pop("addresses")
    report["seconds"], report["processor"] = time.monotonic() - begin, time.process_time()
    report["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    files.write(Path(specification["output"]), json.dumps(report))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing that ends a process group waits for peers


def _peak() -> int:
    """Return ``torch.npu.max_memory_allocated()`` without building the sorted dict of all statistics."""
    import torch_npu

    found = torch_npu._C._npu_memoryStats(int(os.environ["LOCAL_RANK"]))
    return int(found["allocated_bytes"]["all"]["peak"])


@contextlib.contextmanager
def _around(specification: dict[str, Any], report: dict[str, Any]) -> Iterator[None]:
    """Apply a specification inside the ``with`` block: absent peers and their batches, an early end, and
    a routing.
    """
    from megatron_npu.planning.rank import (
        before_training,
        exchanged_batches,
        process_groups,
        routing,
        stage_shapes,
        uneven_shards,
    )

    with contextlib.ExitStack() as stack:
        if specification["alone"]:
            stack.enter_context(process_groups.absent(process_groups.of_npu))
            stack.enter_context(stage_shapes.nominal())
            stack.enter_context(uneven_shards.unchecked())
            if specification.get("batches"):
                stack.enter_context(exchanged_batches.exchanged(Path(specification["batches"])))
        if specification.get("check"):
            stack.enter_context(before_training.stopping())
        if specification.get("imbalance") is not None:
            stack.enter_context(routing.chosen(specification["imbalance"], report))
        yield


def _record(specification: dict[str, Any]) -> None:
    """Record the history of torch_npu's allocator if this is requested.

    For a snapshot, record the calling lines too.
    """
    import torch

    if specification.get("curve"):
        context = "all" if specification.get("snapshot") else None
        torch.npu.memory._record_memory_history("all", context, "python")  # type: ignore[attr-defined]


def _tell_of_asked(noted: Any) -> Any:
    from megatron_npu.planning.rank.program_lines import asking_line
    from megatron_npu.sim import build

    def asked(operation: bytes) -> None:
        noted.asked[f"{asking_line()} ({operation.decode()})"] += 1

    function = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(asked)
    build.compute_library().sim_on_asked(function)
    return function


def _memory() -> dict[str, Any]:
    import torch

    from megatron_npu.sim import counters

    counts = counters._read()
    dry = {name: work.calls for name, work in counts.launches.items() if name.startswith("dry")}
    return {
        "peak": torch.npu.max_memory_allocated(),  # type: ignore[attr-defined]
        "reserved": torch.npu.max_memory_reserved(),  # type: ignore[attr-defined]
        "allocations": torch.npu.memory_stats().get("allocation.all.allocated", 0),  # type: ignore[attr-defined]
        "groups": {name: dataclasses.asdict(group) for name, group in counts.groups.items()},
        "members": _members(),
        "communication": {name: vars(work) for name, work in counts.communication.items()},
        "dry": dry,
    }


def _members() -> dict[str, list[int]]:
    """Return the first and last rank of each process group, keyed by its description."""
    from torch import distributed

    world = distributed.distributed_c10d._world
    ranks = {group.group_desc: sorted(world.pg_group_ranks.get(group) or [0]) for group in world.pg_map}
    return {name: [listed[0], listed[-1]] for name, listed in ranks.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
