"""Rows that come one after the other."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.nn.functional import pad

from megatron_npu.devices.rows import Rows
from tests.support import tiny, warm

BIG, STEPS = 4_000_000, 30  # bytes of what each step makes and frees
GROWTH = f"""
import sys
import torch
from megatron_npu.base import malloc
from megatron_npu.devices.rows import Rows

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

torch.set_num_threads(1)
malloc.keep_freed_memory()
rows = Rows()
for step in range({STEPS}):
    total = torch.zeros(())
    one = torch.empty({BIG} // 4).fill_(1.0)
    two = one * 2
    total += two[0]
    rows.add(total[None])
    del one, two, total
    if step == 2:
        before = resident()
assert rows.all().tolist() == [2.0] * {STEPS}
print(resident() - before)
"""


def test_narrow_rows_are_filled_up():
    parts = [torch.randint(9, shape) for shape in ((3, 4), (2, 6), (5, 2), (1, 6), (7, 9), (1, 1))]
    rows = Rows(-100)
    for part in parts:
        rows.add(part)
    assert torch.equal(
        rows.all(), torch.cat([pad(part, (0, 9 - part.shape[1]), value=-100) for part in parts])
    )
    assert len(rows) == 19


def test_rows_of_one_number_have_no_gradient():
    weight = torch.ones((), requires_grad=True)
    rows = Rows()
    for value in (1.0, 2.0, 4.0):
        rows.add((value * weight)[None])
    assert rows.all().tolist() == [1.0, 2.0, 4.0]
    assert not rows.all().requires_grad


def test_none_at_all():
    with pytest.raises(ValueError, match="no rows"):
        Rows().all()


@pytest.mark.skipif(sys.platform != "linux", reason="the C library is not glibc")
def test_the_process_does_not_grow_with_them():
    command = [sys.executable, "-c", GROWTH]
    done = warm.run(command, env=tiny.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < STEPS / 3 * BIG  # a few times, where the tensor doubles
