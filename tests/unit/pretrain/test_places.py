"""Places for what a run writes: an address of an object storage is none, and became a folder of that name."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_npu.base.errors import UsageError

output = pytest.importorskip("megatron_npu.pretrain.flags.checks.logs_and_checkpoints")


@pytest.mark.parametrize("address", ["s3://bucket/run", "msc://profile/run", "memory://run"])
def test_an_address_is_no_folder(address) -> None:
    args = Namespace(rank=0, save=address, tensorboard_dir=None, data_cache_path=None, json_log=None)
    with pytest.raises(
        UsageError, match=rf"--save must be a directory in a file system, .* but got {address}"
    ):
        output.places(args)


@pytest.mark.parametrize("flags", [{"save": "run\udcff"}, {"data_path": ["1", "run\udcff"]}])
def test_a_name_that_config_yaml_cannot_hold_is_refused(tmp_path, flags) -> None:
    """It was a traceback when the file was written, after the model had been built."""
    args = Namespace(**{"save": str(tmp_path), "load": None, "finetune": False} | flags)
    with pytest.raises(
        UsageError, match=r"--(save|data-path) 'run\\udcff' must be UTF-8, because --save stores"
    ):
        output._spare(args, None)
