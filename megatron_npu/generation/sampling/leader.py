"""Distribute the sampling requests of rank 0 to the other ranks that share the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_npu.base.errors import UsageError
from megatron_npu.generation.sampling.options import Options
from megatron_npu.generation.sampling.sampler import Sample, Sampler, Watch
from megatron_npu.generation.sampling.scores import Score

# How long the other ranks wait for the next prompt: a person may think, a server may have a quiet year.
PATIENCE = timedelta(days=365)


class Leader:
    """The sampler on rank 0, which makes the other ranks execute the same requests.

    Args:
        sampler: this rank's sampler.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        # prompts are host objects, and waiting for one must not keep a device busy
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if dist.get_world_size() > 1 else None

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        options: Options,
        watch: Watch | None = None,
        batch: int | None = None,
    ) -> list[Sample]:
        """Call ``Sampler.sample`` on all ranks, and return its result. Call it only on rank 0.

        Raises:
            UsageError: see ``Sampler.sample``.
        """
        for prompt in prompts:
            self.sampler.check(prompt)
        self._tell(("sample", (prompts, options, _no_opinion if watch else None, batch)))
        return self.sampler.sample(prompts, options, watch, batch)

    def score(
        self,
        texts: Sequence[Sequence[int]],
        firsts: Sequence[int] | None = None,
        alternatives: int = 0,
        batch: int | None = None,
    ) -> list[Score]:
        """Call ``Sampler.score`` on all ranks, and return its result. Call it only on rank 0.

        Raises:
            UsageError: see ``Sampler.score``.
        """
        for text in texts:
            self.sampler.check_text(text)
        self._tell(("score", (texts, firsts, alternatives, batch)))
        return self.sampler.score(texts, firsts, alternatives, batch)

    def end(self) -> None:
        """Stop the other ranks, which only rank 0 may do."""
        self._tell(None)

    def follow(self) -> None:
        """Execute the requests of rank 0 until rank 0 stops. Call it on all other ranks."""
        while (task := self._tell(None)) is not None:
            name, arguments = task
            with contextlib.suppress(UsageError):  # of the model's numbers: rank 0 tells it
                getattr(self.sampler, name)(*arguments)

    def _tell(self, task: Any) -> Any:
        """Exchange the next request: rank 0 sends it, and the other ranks receive it."""
        if self._group is None:
            return task
        box = [task]
        dist.broadcast_object_list(box, 0, group=self._group)
        return box[0]


@contextlib.contextmanager
def leading(sampler: Sampler) -> Iterator[Leader | None]:
    """Provide a Leader on rank 0 inside the ``with`` block.

    On the other ranks, all requests of the Leader are executed before the block is entered, which then
    receives None.
    """
    leader = Leader(sampler)
    if dist.get_rank() > 0:
        leader.follow()
        yield None
        return
    try:
        yield leader
    finally:
        leader.end()


def _no_opinion(place: int, sample: Sample) -> bool:
    return False
