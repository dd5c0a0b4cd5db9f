"""What is refused of megatron-core's pipeline schedules."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest

from megatron_npu.adaptors.megatron_core.run.pipeline_parallel import refuse_batched_p2p
from megatron_npu.base.errors import UsageError


@pytest.mark.parametrize(
    ("stages", "chunks", "batched", "refused"),
    [(2, 2, True, True), (2, 2, False, False), (4, 2, True, False), (2, 1, True, False)],
)
def test_batched_sends_are_refused_where_two_chunks_share_both_ways(stages, chunks, batched, refused):
    config = SimpleNamespace(pipeline_model_parallel_size=stages, batch_p2p_comm=batched)
    schedule = functools.partial(refuse_batched_p2p, lambda **arguments: len(arguments["model"]))
    model = [SimpleNamespace(config=config)] * chunks
    if not refused:
        assert schedule(model=model) == chunks
        return
    with pytest.raises(UsageError, match="batch_p2p_comm=False"):
        schedule(model=model)
