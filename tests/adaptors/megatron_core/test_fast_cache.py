"""``--dataloader-fast-cache-load`` reads cached indices; such a dataset has no documents of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_npu.base.errors import UsageError
from tests.support import tiny


def build(prefix: Path, cache: Path, **changes: Any) -> Any:
    """Return megatron-core's training set, which takes all documents of a file."""
    import megatron_npu

    megatron_npu.install()
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    described = GPTDatasetConfig(
        random_seed=1,
        sequence_length=8,
        tokenizer=SimpleNamespace(eod=255, vocab_size=256, unique_identifiers={"class": "numbers"}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        blend_per_split=[([str(prefix)], None), None, None],
        path_to_cache=str(cache),
        **changes,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [40, 0, 0], lambda: True, described).build()[0]


def test_it_reads_the_samples_that_were_built(tmp_path: Path) -> None:
    prefix = tiny.write_dataset(tmp_path / "numbers", documents=20)
    built = build(prefix, tmp_path / "cache")
    read = build(prefix, tmp_path / "cache", fast_cache_load=True)
    assert len(read) == len(built) >= 40
    for number in (0, 7, 39):
        assert (read[number]["tokens"] == built[number]["tokens"]).all()


@pytest.mark.parametrize("wrong", [-1, 20])
def test_documents_that_are_not_there_are_refused_and_kept(wrong: int, tmp_path: Path) -> None:
    prefix = tiny.write_dataset(tmp_path / "numbers", documents=20)
    build(prefix, tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob("*-document_index.npy")
    index = np.load(file)
    index[-1] = wrong
    np.save(file, index)
    with pytest.raises(UsageError, match="Run once without --dataloader-fast-cache-load"):
        build(prefix, tmp_path / "cache", fast_cache_load=True)
    assert file.is_file()
