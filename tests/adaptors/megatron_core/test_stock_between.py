"""The stock pretrain_gpt.py of the tags between the oldest and the newest: a Llama on a simulated NPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import checkout
from tests.support.simulated import unavailable
from tests.support.stock_core import losses, norms, pretrain

# weights that are drawn on the host are the same on every device
LLAMA = [
    *"--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear".split(),
    *"--group-query-attention --num-query-groups 2 --use-cpu-initialization".split(),
    *"--vocab-size 8191 --train-iters 3 --eval-iters 0".split(),  # mock data of 0.13 counts up that far
]


@pytest.mark.parametrize("version", ["0.13.1", "0.14.0", "0.15.3"])
def test_an_npu_trains_like_the_cpu(version: str, tmp_path: Path) -> None:
    pytest.importorskip("einops", reason="upstream's local attention of 0.13 needs einops")
    tree = checkout("megatron_core", version)
    if unavailable():
        pytest.skip(unavailable())
    cpu, npu = (pretrain(tree, tmp_path, *LLAMA, device=device) for device in ("cpu", "npu"))
    assert losses(npu) == pytest.approx(losses(cpu), rel=1e-6)
    assert norms(npu) == norms(cpu)
    assert len(losses(cpu)) == 3
