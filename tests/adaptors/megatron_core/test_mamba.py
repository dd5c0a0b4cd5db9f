"""Hybrids of Mamba-2 and attention train without mamba_ssm, whose names our scan stands under."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron_npu.base.errors import UsageError
from megatron_npu.standins.mamba_ssm import layernorm_gated, ssd_combined
from tests.support import on_version

SIMULATED = ["0.19.2"]  # a HybridStack; up to 0.17 a MambaStack
if os.environ.get("TEST_EVERY_VERSION") == "1":
    SIMULATED = ["0.12.1", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"]


@pytest.mark.parametrize(("version", "most"), [("0.16.1", 2), ("0.19.2", 1)])
def test_a_hybrid_trains_and_is_the_same_in_two_tensor_parallel_ranks(
    version: str, most: int, tmp_path: Path
) -> None:
    """And the scan of its first layer is what upstream's own steps of generation give (0.16)."""
    for processes in range(1, most + 1):
        on_version.run("mamba_worker", version, str(tmp_path), processes=processes, MEGATRON_NPU_TE="local")


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_packed_sequences_of_a_hybrid_are_the_same_in_two_context_parallel_ranks(
    version: str, tmp_path: Path
) -> None:
    for processes in (1, 2):
        on_version.run(
            "packed_mamba_worker", version, str(tmp_path), processes=processes, MEGATRON_NPU_TE="local"
        )


@pytest.mark.parametrize("version", SIMULATED)
def test_a_hybrid_adds_on_an_npu_as_a_gpt_does(version: str, tmp_path: Path) -> None:
    """Biases in products, sums with the norms that read them, in each of its kinds of layers."""
    on_version.run("mamba_worker", version, str(tmp_path), processes=1, npu=True, MEGATRON_NPU_TE="local")


@pytest.mark.parametrize("before", [False, True])
def test_the_gated_norm(before: bool) -> None:
    norm = layernorm_gated.RMSNorm(8, group_size=4, norm_before_gate=before)
    torch.nn.init.normal_(norm.weight)
    x, z = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    gate = F.silu(z)
    taken = x if before else x * gate
    halves = [F.rms_norm(half, (4,), eps=1e-5) for half in taken.chunk(2, -1)]
    expected = torch.cat(halves, -1) * norm.weight * (gate if before else 1.0)
    torch.testing.assert_close(norm(x, z), expected)


def test_what_only_its_kernels_can_do_is_refused() -> None:
    x, dt, a, b = torch.randn(1, 4, 2, 3), torch.rand(1, 4, 2), -torch.ones(2), torch.randn(1, 4, 1, 5)
    whole = ssd_combined.mamba_chunk_scan_combined(x, dt, a, b, b, 2, seq_idx=None, return_final_states=False)
    assert whole.shape == x.shape
    for given in ({"seq_idx": torch.zeros(1, 3)}, {"return_final_states": True}, {"dt_limit": (0.0, 1.0)}):
        with pytest.raises(UsageError, match=next(iter(given))):
            ssd_combined.mamba_chunk_scan_combined(x, dt, a, b, b, 2, **given)


def test_packed_sequences_are_as_if_each_were_alone() -> None:
    """In values and gradients; the convolution before the scan sees none of its neighbours, too."""
    lengths, heads, width, states = [3, 1, 7], 2, 3, 5
    channels = heads * width + 2 * states
    zxbcdt = torch.randn(1, sum(lengths), heads * width + channels + heads, requires_grad=True)
    weights = torch.randn(channels, 4), torch.randn(channels), torch.randn(heads), -torch.rand(heads)
    rest = {"D": torch.randn(heads), "chunk_size": 4, "headdim": width}
    numbers = torch.arange(3, dtype=torch.int32).repeat_interleave(torch.tensor(lengths))[None]
    scan = ssd_combined.mamba_split_conv1d_scan_combined
    packed = scan(zxbcdt, *weights, **rest, seq_idx=numbers)
    alone = torch.cat([scan(part, *weights, **rest) for part in zxbcdt.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, alone)
    assert not torch.allclose(packed, scan(zxbcdt, *weights, **rest))
    over = torch.randn_like(packed)
    found, wanted = (torch.autograd.grad(output, zxbcdt, over)[0] for output in (packed, alone))
    torch.testing.assert_close(found, wanted)
