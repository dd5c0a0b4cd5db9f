"""Try flags that reduce memory on the rank with the highest peak, starting with the least costly."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_npu.planning.job import TRAIN, Job

_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()


def candidates(job: Job) -> Iterator[tuple[list[str], Job]]:
    """Yield growing sets of flags, each with the resulting job.

    Flags that cost time come last.
    """
    if job.family == TRAIN:
        yield from _of_train(job)
        return
    flags: list[str] = []
    if job.data * job.context > 1 and not job.has("--use-distributed-optimizer"):
        flags.append("--use-distributed-optimizer")
        yield [*flags], job.with_flags(*flags)
    if job.tensor > 1 and not job.has("--sequence-parallel"):
        flags.append("--sequence-parallel")
        yield [*flags], job.with_flags(*flags)
    size = job.number("--micro-batch-size", 1)
    smaller = job
    if size > 1:
        flags += ["--micro-batch-size", "1"]
        smaller = job.without("--micro-batch-size")
        yield [*flags], smaller.with_flags(*flags)
    if not job.has("--recompute-granularity"):
        flags += _RECOMPUTE
        yield [*flags], smaller.with_flags(*flags)


def _of_train(job: Job) -> Iterator[tuple[list[str], Job]]:
    flags: list[str] = []
    if job.data > 1 and not job.is_sharded:
        for sharding in ("--zero-1-memory-optimization", "--fsdp-memory-optimization"):
            flags = [sharding]
            yield [*flags], job.with_flags(*flags)
    flags += ["--micro-batch-size", "1"]
    smaller = job.without("--micro-batch-size")
    yield [*flags], smaller.with_flags(*flags)
    if not job.has("--checkpoint-activations"):
        flags.append("--checkpoint-activations")
        yield [*flags], smaller.with_flags(*flags)


def found(
    job: Job, needed: Callable[[Job], int | None], memory: int
) -> tuple[tuple[list[str], int] | None, list[str]]:
    """Return the first flags with which a job fits, the number of bytes that it then needs, and all flags
    that were tried.

    Args:
        needed: returns the bytes that the rank with the highest peak needs, or None if the job cannot train.
        memory: the number of bytes per device.
    """
    tried = []
    for flags, changed in candidates(job):
        count = needed(changed)
        tried.append(" ".join(flags))
        if count is not None and count <= memory:
            return (flags, count), tried
    return None, tried
