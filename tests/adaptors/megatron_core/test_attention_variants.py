"""Gated delta nets and DeepSeek's sparse attention train without Triton, whose packages ours stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_npu.base.errors import UsageError
from megatron_npu.standins.fla import convolution, gated_delta_rule
from tests.support import on_version


@pytest.mark.parametrize(("version", "most"), [("0.16.1", 1), ("0.19.2", 2)])
def test_both_train_and_are_the_same_in_two_tensor_parallel_ranks(
    version: str, most: int, tmp_path: Path
) -> None:
    for processes in range(1, most + 1):
        on_version.run(
            "variants_worker", version, str(tmp_path), processes=processes, MEGATRON_NPU_TE="local"
        )


def packed() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Queries, keys, values, decays and betas of three sequences, one of them padding; and where they are."""
    q, k, v = (torch.randn(1, 12, 2, 4) for _ in range(3))
    rows = [*(torch.nn.functional.normalize(part, dim=-1) for part in (q, k)), v]
    return [*rows, -torch.rand(1, 12, 2), torch.rand(1, 12, 2)], torch.tensor([0, 5, 9], dtype=torch.int32)


def test_packed_sequences_do_not_see_each_other() -> None:
    parts, places = packed()
    whole, _ = gated_delta_rule.chunk_gated_delta_rule(*parts, cu_seqlens=places)
    alone, _ = gated_delta_rule.chunk_gated_delta_rule(*(part[:, 5:9] for part in parts))
    torch.testing.assert_close(whole[:, 5:9], alone)
    channels, weight = parts[2].flatten(2), torch.randn(8, 3)
    mixed, _ = convolution.causal_conv1d(channels, weight, activation="silu", cu_seqlens=places)
    single, _ = convolution.causal_conv1d(channels[:, 5:9], weight, activation="silu")
    torch.testing.assert_close(mixed[:, 5:9], single)


def test_what_only_its_kernels_can_do_is_refused() -> None:
    parts, _ = packed()
    for given in ({"initial_state": torch.zeros(1)}, {"output_final_state": True}):
        with pytest.raises(UsageError, match="state"):
            gated_delta_rule.chunk_gated_delta_rule(*parts, **given)
    with pytest.raises(UsageError, match="activation"):
        convolution.causal_conv1d(parts[2].flatten(2), torch.randn(8, 3))
