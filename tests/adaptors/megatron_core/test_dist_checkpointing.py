"""``megatron.core.dist_checkpointing`` on this torch."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def checkpoint(single_process, tmp_path):
    """A checkpoint of two tensors, of which one lies in files of its own."""
    from megatron.core.dist_checkpointing import ShardedTensor, save
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    tensors = {
        "kept": ShardedTensor.from_rank_offsets("kept", torch.arange(6.0).reshape(2, 3)),
        "gone": ShardedTensor.from_rank_offsets("optimizer.gone", torch.ones(4)),
    }
    save(tensors, str(tmp_path), TorchDistSaveShardedStrategy("torch_dist", 1, separation_hint="optimizer"))
    return tmp_path


def test_tensors_of_a_prefix_are_removed(checkpoint):
    from megatron.core.dist_checkpointing import ShardedTensor, load, remove_sharded_tensors
    from torch.distributed.checkpoint import FileSystemReader

    before = set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)
    remove_sharded_tensors(checkpoint, key_prefix="optimizer")
    after = set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)
    assert before - after == {"optimizer.gone"}
    assert not list(checkpoint.glob("optimizer*"))
    wanted = {"kept": ShardedTensor.from_rank_offsets("kept", torch.empty(2, 3))}
    assert torch.equal(load(wanted, str(checkpoint))["kept"], torch.arange(6.0).reshape(2, 3))
