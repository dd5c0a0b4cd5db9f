"""Options of the stock pretrain_gpt.py of core_v0.16.1 that upstream leaves to TransformerEngine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import checkout
from tests.hosts.megatron_core.stock import losses, pretrain


@pytest.fixture(scope="module")
def tree() -> Path:
    pytest.importorskip("megatron.core")
    return checkout("megatron_core", "0.16.1")


@pytest.mark.parametrize(
    "options",
    [
        "--position-embedding-type rope --rotary-interleaved --qk-l2-norm --window-size 8,0",
        "--position-embedding-type rope --multi-latent-attention --softmax-type learnable",
    ],
)
def test_attention_options_train(tree: Path, tmp_path: Path, options: str) -> None:
    curve = losses(pretrain(tree, tmp_path, *options.split()))
    assert len(curve) == 6
    assert curve[-1] < curve[0] - 0.03
