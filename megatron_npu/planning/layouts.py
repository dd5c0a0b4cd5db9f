"""List the possible layouts of a job, which are the combinations of parallel sizes and options in which
every split is even.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_npu.planning.job import Job
from megatron_npu.planning.shape import Shape

_RECOMPUTED = {
    "none": (),
    "selective": ("--recompute-granularity", "selective"),
    "full": (
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "uniform",
        "--recompute-num-layers",
        "1",
    ),
}
_REPLACED = (
    "--tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size "
    "--expert-model-parallel-size --micro-batch-size --num-layers-per-virtual-pipeline-stage "
    "--num-virtual-stages-per-pipeline-rank --recompute-granularity --recompute-method "
    "--recompute-num-layers --use-distributed-optimizer --sequence-parallel"
).split()
_LARGEST_MICRO_BATCH = 8


@dataclass(frozen=True)
class Layout:
    """A combination of parallel sizes, micro-batch size, recomputation, and sharding of optimizer states.

    Attributes:
        chunks: the number of model chunks per pipeline stage.
        micro_batches: the number of micro batches per iteration.
    """

    tensor: int
    pipeline: int
    chunks: int
    context: int
    expert: int
    data: int
    micro_batch: int
    micro_batches: int
    recomputed: str
    shared: bool

    def flags(self, shape: Shape) -> list[str]:
        """Return the flags that select this layout."""
        sizes = {
            "--tensor-model-parallel-size": (self.tensor, 1),
            "--pipeline-model-parallel-size": (self.pipeline, 1),
            "--context-parallel-size": (self.context, 1),
            "--expert-model-parallel-size": (self.expert, 1),
            "--micro-batch-size": (self.micro_batch, 0),
        }
        words = [word for flag, (size, usual) in sizes.items() if size != usual for word in (flag, str(size))]
        if self.chunks > 1:
            each = shape.layers // self.pipeline // self.chunks
            words += ["--num-layers-per-virtual-pipeline-stage", str(each)]
        words += _RECOMPUTED[self.recomputed]
        words += ["--sequence-parallel"] * (self.tensor > 1)
        return words + ["--use-distributed-optimizer"] * self.shared

    def job(self, job: Job, shape: Shape) -> Job:
        """Return a job with its layout replaced by this one."""
        return job.without(*_REPLACED).with_flags(*self.flags(shape))


def all_of(job: Job, shape: Shape, per_node: int) -> Iterator[Layout]:
    """Yield each layout in which every split is even.

    Tensor-parallel groups stay within a machine.
    """
    batch = job.number("--global-batch-size", 0)
    for tensor, pipeline, context, data in _sizes(job.devices, shape, per_node):
        for expert in _experts(shape, data * context):
            for micro in _powers(_LARGEST_MICRO_BATCH):
                if batch % (micro * data):
                    continue
                count = batch // (micro * data)
                for chunks in _chunks(shape.layers // pipeline, pipeline, count):
                    for recomputed in _RECOMPUTED:
                        for shared in (True, False) if data * context > 1 else (False,):
                            yield Layout(
                                *(tensor, pipeline, chunks, context, expert, data, micro, count),
                                recomputed,
                                shared,
                            )


def _sizes(devices: int, shape: Shape, per_node: int) -> Iterator[tuple[int, int, int, int]]:
    for tensor in _divisors(devices, min(per_node, shape.groups)):
        if shape.heads % tensor or shape.groups % tensor or shape.ffn % tensor:
            continue
        for pipeline in _divisors(devices // tensor, shape.layers):
            if shape.layers % pipeline:
                continue
            rest = devices // tensor // pipeline
            for context in _divisors(rest, rest):
                if context == 1 or shape.length % (2 * context * tensor) == 0:
                    yield tensor, pipeline, context, rest // context


def _experts(shape: Shape, ranks: int) -> list[int]:
    if not shape.experts:
        return [1]
    return [size for size in _divisors(ranks, shape.experts) if shape.experts % size == 0]


def _chunks(layers: int, pipeline: int, micro_batches: int) -> list[int]:
    """Return the possible numbers of model chunks for a pipeline stage with ``layers`` layers."""
    if pipeline == 1 or micro_batches % pipeline:
        return [1]
    return [count for count in _divisors(layers, layers) if count == 1 or pipeline > 2]


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]
