"""Ring attention over HCCL: npu_fusion_attention part by part, its gradient from one logarithm per query."""

from __future__ import annotations

from tests.distributed.test_ring_attention import RANKS, WORKER


def test_three_npus_are_the_whole_sequence(simulated) -> None:
    done = simulated("python", str(RANKS), "--torch", "3", str(WORKER))
    assert done.returncode == 0, done.stdout[-4000:]
    # two dtypes, causal and not, three parts each; nothing is gathered
    launches = {"npu::npu_fusion_attention": 12, "npu::npu_fusion_attention_grad": 12}
    for rank in range(3):
        assert f"rank {rank}: {launches}, ['BatchSendRecv']" in done.stdout
