"""Upstream's scheduler of --hybrid-context-parallel: sub-samples on 1, 2 and 4 ranks, against one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.adaptors.megatron_core.stock import losses, norms
from tests.conftest import checkout
from tests.end_to_end import tiny

WORKER = Path(__file__).with_name("hybrid_batches_worker.py")
VERSIONS = ["0.17.1", "0.19.1"]  # each patch is in one of them
if os.environ.get("TEST_EVERY_VERSION") == "1":
    VERSIONS = ["0.16.1", "0.17.1", "0.18.2", "0.19.1"]


def run(version: str, ranks: int, *flags: str):
    """Return what the stock script of a version has done."""
    env = tiny.environment() | {"MEGATRON_LM_PATH": str(checkout("megatron_core", version))}
    done = tiny.run_python([sys.executable, *tiny.torchrun(ranks), str(WORKER), *flags], env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.parametrize("version", VERSIONS)
def test_packed_samples_that_are_dealt_out_train_as_their_parts_one_by_one(version: str) -> None:
    """Each of four samples of 128 tokens is one to five sequences; 32 tokens fit on a rank."""
    pytest.importorskip("megatron.core")
    apart = run(version, 1)
    dealt = run(version, 4, *"--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 32".split())
    assert dealt.stdout.count("ranks of sub-samples: [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 4, 4]") == 3
    assert len(losses(apart)) == 3
    assert losses(dealt) == pytest.approx(losses(apart), rel=1e-6)
    assert norms(dealt) == pytest.approx(norms(apart), abs=2e-3)  # three decimals are printed
