"""Datasets of ``--dataset-impl lazy`` and ``cached``, which upstream alone takes for a bad header."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import indexed_dataset

indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")


def written(prefix, *, lazy):
    with indexed_dataset.Writer(str(prefix), np.dtype(np.int32), lazy=lazy) as writer:
        tokens = np.arange(10, dtype=np.int32).tobytes()
        writer.add(tokens, np.array([4, 0, 6], np.int32), np.array([2, 1]))
        writer.finish()
        indexed_dataset.publish([writer])
    return str(prefix)


def test_it_is_read_as_one_of_today(tmp_path):
    theirs = indexed.IndexedDataset(written(tmp_path / "mmap", lazy=False))
    ours = indexed.IndexedDataset(written(tmp_path / "lazy", lazy=True))
    assert [row.tolist() for row in ours] == [row.tolist() for row in theirs]
    for name in ("document_indices", "sequence_lengths"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype
    assert ours.get(2, offset=2, length=3).tolist() == [6, 7, 8]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # upstream's __del__
def test_one_that_is_damaged_is_said(tmp_path):
    prefix = written(tmp_path / "lazy", lazy=True)
    with open(f"{prefix}.idx", "r+b") as stream:
        stream.truncate(80)
    with pytest.raises(UsageError, match="truncated"):
        indexed.IndexedDataset(prefix)
