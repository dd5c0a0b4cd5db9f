"""Provide the shapes of tensors that absent pipeline stages would send."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_npu.base.errors import UsageError
from megatron_npu.planning.rank import program_lines

# Megatron's p2p_communication, 0.12.1 to 0.19: this function receives the shapes for its caller
_EXCHANGE, _CALLER = "_communicate_shapes", "_communicate"


@contextlib.contextmanager
def nominal() -> Iterator[None]:
    """Return the expected shape ``[s, b, h]`` wherever pipeline stages would exchange shapes.

    Megatron exchanges shapes with ``--variable-seq-lengths``, and in 0.16 and newer for layers of multi-token
    prediction in a stage without the loss. With the former, the nominal sequence length is planned.
    """
    exchange = dist.batch_isend_irecv

    @functools.wraps(exchange)
    def batch_isend_irecv(*given: Any, **named: Any) -> Any:
        works = exchange(*given, **named)
        caller = _caller(sys._getframe(1))
        if caller is not None:
            operations = inspect.signature(exchange).bind(*given, **named).arguments["p2p_op_list"]
            _receive(operations, caller)
        return works

    with mock.patch.object(dist, "batch_isend_irecv", batch_isend_irecv):
        yield


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the frame of ``_communicate`` if this function is currently exchanging shapes."""
    exchange = program_lines.nearest(_EXCHANGE, frame)
    return exchange and program_lines.nearest(_CALLER, exchange)


def _receive(operations: list[Any], caller: FrameType) -> None:
    if getattr(caller.f_locals.get("config"), "mtp_standalone", False):
        raise UsageError(
            "a pipeline stage has multi-token prediction layers but not the loss, so `plan` cannot "
            "determine the shapes that the neighboring stages send",
            remedy="Put both into one stage, such as mL at the end of --pipeline-model-parallel-layout.",
        )
    shape = torch.tensor(tuple(caller.f_locals["tensor_shape"]))
    for operation in operations:
        if operation.op.__name__ == "irecv":
            operation.tensor.copy_(shape)
