"""Core attention under context parallelism, in two, four and eight processes, against the whole sequence."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.attention.layer_options import comm_type
from megatron_npu.base.errors import UsageError
from megatron_npu.ops import dispatch
from megatron_npu.ops.attention.context_parallel.packed import token_indices
from tests.adaptors.megatron_core.conftest import make_config
from tests.support import on_version, tiny, warm
from tests.support.simulated import run_simulated, unavailable

WORKER = Path(__file__).with_name("context_parallel_worker.py")
CASES = 6 + 5  # masks of a batch, and packed documents
WAYS = {2: 3, 4: 2, 8: 3}  # to communicate; on four ranks the two that are rings
RARELY = pytest.mark.skipif(
    os.environ.get("TEST_EVERY_VERSION") != "1", reason="TEST_EVERY_VERSION=1 runs it"
)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_mask_and_window_is_that_of_the_whole_sequence(ranks) -> None:
    pytest.importorskip("megatron.core")
    done = tiny.run_python([sys.executable, *tiny.torchrun(ranks), str(WORKER)])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal: ") == CASES * WAYS[ranks]


def over_hccl(ranks: int, **variables: str) -> None:
    """Run the worker on simulated NPUs; it must have compared every case, and the bytes of rings."""
    pytest.importorskip("megatron.core")
    if unavailable():
        pytest.skip(unavailable())
    command = [sys.executable, *tiny.torchrun(ranks), str(WORKER)]
    done = run_simulated(*command, modules=warm.DRIVER, **variables)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("equal: ") == CASES * WAYS[ranks]


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=RARELY)])
def test_so_it_is_over_hccl(ranks) -> None:
    over_hccl(ranks)


@RARELY
@pytest.mark.parametrize("version", ["0.12.1", "0.19.2"])
def test_so_it_is_over_hccl_with_other_versions(version) -> None:
    """Rings of four ranks, and of two pairs of near ones."""
    over_hccl(4, **on_version.environment(version))


@pytest.fixture
def config():
    pytest.importorskip("megatron.core")
    return make_config(context_parallel_size=2, num_query_groups=2)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (None, "p2p"),
        ("p2p", "p2p"),
        ("all_gather", "all_gather"),
        ("allgather", "all_gather"),
        ("a2a", "a2a"),
    ],
)
def test_each_way_to_communicate_is_the_one_asked_for(config, monkeypatch, asked, given) -> None:
    monkeypatch.setattr(dispatch, "fallbacks", {})
    assert comm_type(config, asked) == given
    assert not dispatch.fallbacks


def test_near_and_far_ranks_have_two_sizes(config) -> None:
    with pytest.raises(UsageError, match=r"two hierarchical sizes .* but got \[\]"):
        comm_type(config, "a2a+p2p")
    config.context_parallel_size = 8
    config.hierarchical_context_parallel_sizes = [2, 4]
    assert comm_type(config, "a2a+p2p") == "a2a+p2p"  # two heads of keys, for the two near ranks
    config.hierarchical_context_parallel_sizes = [4, 2]
    with pytest.raises(UsageError, match="the number of key heads, 2, to be a multiple of 4"):
        comm_type(config, "a2a+p2p")


def test_what_is_not_there_is_refused(config) -> None:
    with pytest.raises(UsageError, match="p2p, all_gather, a2a or a2a"):
        comm_type(config, "ring")


def test_heads_that_cannot_be_dealt_out_are_refused(config) -> None:
    config.tensor_model_parallel_size = 2
    with pytest.raises(UsageError, match="the number of key heads, 2, to be a multiple of 4"):
        comm_type(config, "a2a")


class _Rank(NamedTuple):
    """As much of a group as dropout asks for."""

    number: int

    def rank(self) -> int:
        return self.number


def test_ranks_drop_other_weights_and_go_on_alike() -> None:
    pytest.importorskip("megatron.core")
    from megatron_npu.adaptors.megatron_core.attention.context_parallel import draws_of_rank

    device = devices.current()
    state = device.rng_state()
    found = []
    for rank in (0, 1, 0):
        device.set_rng_state(state)
        with draws_of_rank(0.1, _Rank(rank)):
            within = torch.rand(4, device=device.torch_device())
        found.append((within.tolist(), torch.rand(4, device=device.torch_device()).tolist()))
    assert found[0] == found[2]
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]
    device.set_rng_state(state)
    assert torch.rand(4, device=device.torch_device()).tolist() != found[0][1]  # the next layer's are others
    device.set_rng_state(state)
    with draws_of_rank(0.0, _Rank(1)):
        pass
    assert torch.equal(device.rng_state(), state)


@pytest.mark.parametrize(("starts", "rank", "tokens"), [([0, 4, 12], 0, [0, 3, 4, 5, 10, 11])])
def test_each_document_is_cut_into_chunks(starts, rank, tokens) -> None:
    assert token_indices(starts, 2, rank).tolist() == tokens
    with pytest.raises(UsageError, match="multiples of 4"):
        token_indices([0, 4, 11], 2, rank)
