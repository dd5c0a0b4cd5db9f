"""Core attention under context parallelism, in two processes, against the whole sequence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_npu.adaptors.megatron_core.attention.layer_options import comm_type
from megatron_npu.errors import UsageError
from megatron_npu.ops import dispatch
from megatron_npu.ops.attention.context_parallel.packed import token_indices
from tests.adaptors.megatron_core.conftest import make_config
from tests.end_to_end import tiny
from tests.sim.conftest import run_simulated, unavailable

WORKER = Path(__file__).with_name("context_parallel_worker.py")
LAUNCHER = tiny.torchrun(2)
CASES = 3 * (6 + 5)  # three ways to communicate; masks of a batch, and packed documents


def test_every_mask_and_window_is_that_of_the_whole_sequence() -> None:
    pytest.importorskip("megatron.core")
    done = tiny.run_python([sys.executable, *LAUNCHER, str(WORKER)])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal: ") == CASES


def test_so_it_is_over_hccl() -> None:
    pytest.importorskip("megatron.core")
    if unavailable():
        pytest.skip(unavailable())
    done = run_simulated(sys.executable, *LAUNCHER, str(WORKER))
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("equal: ") == CASES


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


def test_what_is_not_there_is_reported_or_refused(config, monkeypatch, caplog) -> None:
    monkeypatch.setattr(dispatch, "fallbacks", {})
    assert comm_type(config, "a2a+p2p") == "p2p"
    assert list(dispatch.fallbacks) == [
        ("--cp-comm-type a2a+p2p", "hierarchical context parallelism is not here")
    ]
    assert "--cp-comm-type a2a+p2p runs as one ring over all ranks: " in caplog.text
    with pytest.raises(UsageError, match="p2p, all_gather, a2a or a2a"):
        comm_type(config, "ring")


def test_heads_that_cannot_be_dealt_out_are_refused(config) -> None:
    config.tensor_model_parallel_size = 2
    with pytest.raises(UsageError, match="2 heads of keys on 4 ranks"):
        comm_type(config, "a2a")


@pytest.mark.parametrize(("starts", "rank", "tokens"), [([0, 4, 12], 0, [0, 3, 4, 5, 10, 11])])
def test_each_document_is_cut_into_chunks(starts, rank, tokens) -> None:
    assert token_indices(starts, 2, rank).tolist() == tokens
    with pytest.raises(UsageError, match="multiples of 4"):
        token_indices([0, 4, 11], 2, rank)
