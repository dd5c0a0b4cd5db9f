"""What ``megatron.legacy.data`` reads, on the Megatron-LM that MEGATRON_LM_PATH names: nothing of it runs."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import megatron_npu
from megatron_npu.base.errors import UsageError
from tests.support.payload import Runs


def refuses(read, *given) -> str:
    """Return the line in which something hostile is refused."""
    try:
        read(*given)
    except UsageError as error:
        return str(error)
    raise AssertionError("it was read")


def check_indices(folder: Path) -> None:
    """Each module that caches indices reads numbers, and no pickle."""
    file, mark = folder / "indexmap.npy", folder / "mark"
    for name in ("dataset_utils", "biencoder_dataset_utils", "realm_dataset_utils"):
        module = importlib.import_module(f"megatron.legacy.data.{name}")
        module.np.save(str(file), np.arange(6).reshape(2, 3), allow_pickle=True)
        assert module.np.load(str(file), allow_pickle=True, mmap_mode="r").tolist() == [[0, 1, 2], [3, 4, 5]]
        file.write_bytes(pickle.dumps(Runs(mark)))
        assert "posix.mkdir" in refuses(lambda np: np.load(str(file), allow_pickle=True), module.np)
        assert not mark.exists()


def check_embeddings(folder: Path) -> None:
    """Embeddings are written and merged as upstream does, and no pickle of a stranger runs."""
    from megatron.core import mpu
    from megatron.legacy.data import realm_index

    mpu.model_parallel_is_initialized = lambda: False
    path, mark = folder / "blocks.pkl", folder / "mark"
    shards = [
        realm_index.OpenRetreivalDataStore(str(path), load_from_path=False, rank=rank) for rank in (0, 1)
    ]
    for rank, shard in enumerate(shards):
        shard.add_block_data(np.array([2 * rank, 2 * rank + 1]), np.full((2, 4), rank + 0.5))
        shard.save_shard()
    shards[0].merge_shards_and_save()
    found = realm_index.OpenRetreivalDataStore(str(path), rank=0).embed_data
    assert {int(key): value.tolist() for key, value in found.items()} == {
        key: [key // 2 + 0.5] * 4 for key in range(4)
    }
    assert {value.dtype for value in found.values()} == {np.dtype(np.float16)}
    for content in (Runs(mark), {"embed_data": {0: Runs(mark)}}, {"embed_data": SimpleNamespace(a=1)}):
        path.write_bytes(pickle.dumps(content))
        said = refuses(realm_index.OpenRetreivalDataStore, str(path), True, 0)
        assert "the pickle refers to" in said, said
        assert not mark.exists()


if __name__ == "__main__":
    megatron_npu.install()
    check_indices(Path(sys.argv[1]))
    check_embeddings(Path(sys.argv[1]))
