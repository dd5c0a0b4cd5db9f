"""Run one rank on simulated CUDA devices: ``python -m megatron_npu.planning.rank.cuda SPECIFICATION``."""

from __future__ import annotations

import sys

from megatron_npu.planning.fake_cuda import library

if __name__ == "__main__":
    library.load()  # before torch is imported

import contextlib
import functools
import json
import os
import resource
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from megatron_npu import plugin
from megatron_npu.base import files
from megatron_npu.commands import cli
from megatron_npu.ops import triton
from megatron_npu.ops.attention import packed_mask
from megatron_npu.planning import timeline
from megatron_npu.planning.fake_cuda import machine, values
from megatron_npu.planning.fake_cuda.memory import CountedTensors
from megatron_npu.planning.rank import before_training, measurements, process_groups, program_lines, routing
from megatron_npu.planning.replay import Allocator, DeviceFullError

_TOLD = {3: [1, 1, 1]}  # that there are data to train, validate and test on


def main(path: str) -> int:
    """Run a rank as a specification file describes."""
    begin = time.monotonic()
    specification = json.loads(Path(path).read_text(encoding="utf-8"))
    allocator = Allocator(specification.get("limit"))
    if specification.get("curve"):
        allocator.events = []
    report: dict[str, Any] = {"rank": int(os.environ["RANK"]), "code": None, "error": None}
    mode = functools.partial(CountedTensors, allocator=allocator)
    plain: list[str] = []
    with (
        machine.installed(),
        _fused_attention(plain),
        mock.patch.object(machine, "Tensors", mode),
        # no driver is asked here: the devices that are planned for have one
        mock.patch.object(triton, "_trouble", return_value=None),
        # fake masks have no values: each row is one sequence, as where no document ends inside a sample
        mock.patch.object(packed_mask, "_starts", return_value=[0]),
        _memory(allocator),
        process_groups.no_first_contact(),
    ):
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        with (
            machine.running(rank, ranks, _TOLD) as tensors,
            measurements.taken("cuda", lambda: allocator.peak, address=_address(tensors)) as noted,
            before_training.stopping() if specification.get("check") else contextlib.nullcontext(),
            routing.chosen(specification["imbalance"], report, values.fake),
        ):
            tensors.asked = functools.partial(_note_asked, noted)
            if specification.get("snapshot"):
                allocator.frames = functools.partial(_calling_lines, tensors)
            os.environ["LOCAL_WORLD_SIZE"] = str(min(ranks, 8))
            plugin.install()
            try:
                report["code"] = cli.main(specification["words"])
            except SystemExit as end:
                report["code"] = end.code if isinstance(end.code, int) else int(end.code is not None)
            except before_training.ReadyError:
                report["ready"] = True
            except DeviceFullError as error:
                report["error"], report["out_of_memory"] = str(error), True
                report["asked_by"] = program_lines.failing_line(error)
            except BaseException as error:
                traceback.print_exc()
                report["error"] = f"{type(error).__name__}: {str(error)[:400]}"
    report |= vars(noted)
    if allocator.events is not None:
        snapshot = {"segments": allocator.segments(), "device_traces": [allocator.events]}
        timeline.keep(snapshot, noted.addresses, report, specification.get("snapshot"))
    report |= {"peak": allocator.peak, "reserved": allocator.peak_reserved, "allocations": allocator.count}
    report |= {
        "workspaces": getattr(tensors, "workspaces", 0),
        "plain_attention": sorted(set(plain)),
        "without_triton": triton.not_to_be_expected(),
        "groups": tensors.traffic.groups,  # type: ignore[attr-defined]
        "members": tensors.traffic.members,  # type: ignore[attr-defined]
        "dry": {},
    }
    report.pop("addresses")
    report["seconds"], report["processor"] = time.monotonic() - begin, time.process_time()
    report["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    files.write(Path(specification["output"]), json.dumps(report))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _note_asked(noted: measurements.Measurements, operation: str) -> None:
    noted.asked[f"{program_lines.asking_line()} ({operation})"] += 1


def _calling_lines(tensors: Any) -> list[dict[str, Any]]:
    return program_lines.calling_lines(tensors.running)


def _address(tensors: Any) -> Callable[[torch.Tensor], int]:
    def address(tensor: torch.Tensor) -> int:
        return int(tensors.address(tensor))

    return address


@contextlib.contextmanager
def _memory(allocator: Allocator) -> Iterator[None]:
    """Make torch.cuda report the memory of the simulated allocator."""
    says = {
        "memory_allocated": lambda device=None: allocator.allocated,
        "max_memory_allocated": lambda device=None: allocator.peak,
        "memory_reserved": lambda device=None: allocator.reserved,
        "max_memory_reserved": lambda device=None: allocator.peak_reserved,
    }
    with contextlib.ExitStack() as stack:
        for name, function in says.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        yield


@contextlib.contextmanager
def _fused_attention(plain: list[str]) -> Iterator[None]:
    """Use the fused SDPA kernel that torch would select on an H100.

    A CPU build of torch would use the plain formula.

    On an H100, the first choice is cuDNN's kernel, whose output has the memory layout of the queries (torch
    2.11), followed by flash attention.

    Args:
        plain: collects the reasons why the fused kernel does not support a call.
    """
    original = F.scaled_dot_product_attention

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        why = None
        if attn_mask is not None:
            why = "a mask is given"
        elif query.dtype not in (torch.float16, torch.bfloat16):
            why = f"dtype {query.dtype}"
        elif query.shape[-1] > 256 or value.shape[-1] != query.shape[-1]:
            why = "size of a head"
        if why is not None or query.device.type != "cuda":
            if query.device.type == "cuda":
                plain.append(str(why))
            return original(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if query.shape[-1] <= 128 and query.shape[-1] % 8 == 0:
            fused = torch.ops.aten._scaled_dot_product_cudnn_attention
            return fused(query, key, value, None, True, dropout_p, is_causal, False, scale=scale)[0]
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]

    with mock.patch.object(F, "scaled_dot_product_attention", attention):
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
