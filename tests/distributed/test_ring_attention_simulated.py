"""Ring attention over HCCL: npu_fusion_attention part by part, its gradient from one logarithm per query."""

from __future__ import annotations

from tests.distributed.ring_worker import BATCH, CHUNK, GROUPS, SIZE
from tests.distributed.test_ring_attention import RANKS, WORKER
from tests.support.simulated import simulated  # noqa: F401  a fixture


def test_three_npus_are_the_whole_sequence(simulated) -> None:  # noqa: F811
    done = simulated("python", str(RANKS), "--torch", "3", str(WORKER))
    assert done.returncode == 0, done.stdout[-4000:]
    token = 2 * BATCH * GROUPS * SIZE * 4  # key and value in fp32
    # A ring: keys and values go on twice, in backward again, gradients three times. Documents: batch of one.
    whole = 7 * 2 * CHUNK * token
    # A window of four: the last four keys of a chunk go to the rank of the next one, in backward again, and
    # their gradients come back. The middle rank has two neighbours, the others one.
    border = 4 * token
    expected = {
        0: (3, 3, 3, whole, whole, whole),
        1: (3, 3, 3, whole, whole, whole),
        2: (3, 4, 4, 3 * border, 6 * border, 3 * border),
        4: (3, 3, 3, *[whole // BATCH] * 3),
        5: (3, 3, 3, *[whole // BATCH] * 3),
    }
    for case, numbers in expected.items():
        for rank in range(3):
            launches = {"fusion_attention": numbers[rank], "fusion_attention_grad": numbers[rank]}
            line = f"case {case}, rank {rank}: {launches}, ['BatchSendRecv'], {numbers[3 + rank]} bytes"
            assert line in done.stdout
