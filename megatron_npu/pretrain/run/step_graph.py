"""Implement --cuda-graph-impl local, which captures the forward and backward passes of a step as a CUDA
graph.

The host then launches one graph instead of thousands of kernels, so steps whose kernels are shorter than the
Python code between them take only the time of the kernels. This is equivalent to upstream's wrapper
(``full_cuda_graph.py``, megatron-core 0.16.1), but supports any megatron-core version and does not require
TransformerEngine.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_npu.pretrain.data import datasets as data

WARM_UP = 3  # steps before: caches, autotuning and lazy buffers must be there when the graph is captured

Compute = Callable[..., list[torch.Tensor]]


@contextlib.contextmanager
def on_its_stream(captures: bool) -> Iterator[None]:
    """Select a stream that supports graph capture, before the model is built, if ``captures`` is True.

    CUDA's default stream cannot be captured, and autograd accumulates a gradient on the stream on which the
    weight was first used.
    """
    if not captures:
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


class StepGraph:
    """Replacement for megatron-core's ``forward_backward_func`` for models without pipeline parallelism.

    A graph is captured after ``WARM_UP`` steps, and again when the number of micro batches changes (with a
    batch size ramp). Evaluation is not captured.

    Args:
        compute: megatron-core's function.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[data.Batch] = []
        self._outputs: list[torch.Tensor] = []
        self._steps = 0  # with this number of micro batches

    def __call__(
        self,
        *,
        data_iterator: Iterator[data.Batch],
        num_microbatches: int,
        forward_only: bool,
        **others: Any,
    ) -> list[torch.Tensor]:
        """Return the loss sum and token count of each micro-batch, ``[2]``, as computed by ``compute``."""
        others |= {"num_microbatches": num_microbatches, "forward_only": forward_only}
        if forward_only:
            return self._compute(data_iterator=data_iterator, **others)
        if num_microbatches != len(self._inputs):
            self._forget(num_microbatches)
        batches = [next(data_iterator) for _ in range(num_microbatches)]
        self._steps += 1
        if self._steps <= WARM_UP:
            return self._compute(data_iterator=iter(batches), **others)
        if self._graph is None:
            self._capture(batches, others)
        else:
            self._fill(batches)
        assert self._graph is not None
        self._graph.replay()
        return self._outputs

    def _forget(self, micro_batches: int) -> None:
        """Discard the graph to free its device memory, so that the warm-up steps are repeated."""
        self._graph, self._outputs, self._steps = None, [], 0
        self._inputs = [{} for _ in range(micro_batches)]
        gc.collect()

    def _capture(self, batches: list[data.Batch], others: dict[str, Any]) -> None:
        """Capture the kernels of a step as a graph without executing them."""
        self._inputs = [{name: _own(value) for name, value in batch.items()} for batch in batches]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # of this thread alone: NCCL's watchdog asks for events from its own
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self._outputs = self._compute(data_iterator=iter(self._inputs), **others)
        torch.cuda.synchronize()
        self._graph = graph

    def _fill(self, batches: list[data.Batch]) -> None:
        """Copy a step's data into the buffers that the graph reads."""
        for own, batch in zip(self._inputs, batches, strict=True):
            for name, value in batch.items():
                if isinstance(value, torch.Tensor):
                    own[name].copy_(value, non_blocking=True)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
