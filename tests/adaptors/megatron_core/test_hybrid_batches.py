"""Upstream's scheduler of --hybrid-context-parallel: sub-samples on 1, 2 and 4 ranks, against one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import checkout
from tests.support import tiny, warm
from tests.support.simulated import run_simulated, unavailable
from tests.support.stock_core import losses, norms

WORKER = Path(__file__).with_name("hybrid_batches_worker.py")
EVERY = ["0.16.1", "0.17.1", "0.18.2", "0.19.1"]
ON_REQUEST = os.environ.get("TEST_EVERY_VERSION") == "1"
VERSIONS = EVERY if ON_REQUEST else ["0.17.1", "0.19.1"]  # each patch is in one of them


DEALT = "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 32".split()
RANKS = "ranks of sub-samples: [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 4, 4]"


def run(version: str, ranks: int, *flags: str):
    """Return what the stock script of a version has done."""
    tree = checkout("megatron_core", version)
    done = warm.run(
        [sys.executable, *tiny.torchrun(ranks), str(WORKER), *flags],
        env=tiny.environment() | {"MEGATRON_LM_PATH": str(tree)},
        modules=warm.STOCK,
        tree=tree,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def run_on_npus(version: str, ranks: int, *flags: str):
    """Return what it has done on simulated NPUs."""
    tree = checkout("megatron_core", version)
    done = run_simulated(
        *(sys.executable, *tiny.torchrun(ranks), str(WORKER), *flags),
        modules=warm.STOCK,
        tree=tree,
        MEGATRON_LM_PATH=str(tree),
    )
    done.stderr = done.stdout  # it has both
    assert done.returncode == 0, done.stdout[-3000:]
    return done


def compare(dealt, apart) -> None:
    """Compare three steps: of sequences that were dealt out to ranks, and one by one in one process."""
    assert dealt.stdout.count(RANKS) == 3
    assert len(losses(apart)) == 3
    assert losses(dealt) == pytest.approx(losses(apart), rel=1e-6)
    assert norms(dealt) == pytest.approx(norms(apart), abs=2e-3)  # three decimals are printed


@pytest.mark.parametrize("version", VERSIONS)
def test_packed_samples_that_are_dealt_out_train_as_their_parts_one_by_one(version: str) -> None:
    """Each of four samples of 128 tokens is one to five sequences; 32 tokens fit on a rank."""
    pytest.importorskip("megatron.core")
    compare(run(version, 4, *DEALT), run(version, 1))


@pytest.mark.skipif(not ON_REQUEST, reason="TEST_EVERY_VERSION=1 runs it")
@pytest.mark.parametrize("version", EVERY)
def test_so_they_do_on_npus(version: str) -> None:
    """Over HCCL, against one process of a CPU; with the weights of one, as an NPU draws others."""
    pytest.importorskip("megatron.core")
    if unavailable():
        pytest.skip(unavailable())
    weights = "--use-cpu-initialization"
    compare(run_on_npus(version, 4, *DEALT, weights), run(version, 1, weights))
