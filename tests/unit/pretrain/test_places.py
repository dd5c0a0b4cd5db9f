"""Places for what a run writes: an address of an object storage is none, and became a folder of that name."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_npu.base.errors import UsageError

output = pytest.importorskip("megatron_npu.pretrain.flags.checks.output")


@pytest.mark.parametrize("address", ["s3://bucket/run", "msc://profile/run", "memory://run"])
def test_an_address_is_no_folder(address) -> None:
    args = Namespace(rank=0, save=address, tensorboard_dir=None, data_cache_path=None, json_log=None)
    with pytest.raises(
        UsageError, match=rf"--save must be a directory in a file system, .* but got {address}"
    ):
        output.places(args)
