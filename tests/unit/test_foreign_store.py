"""A rank that finds another program at MASTER_PORT ends with one line."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_npu import watchdog
from megatron_npu.base.errors import UsageError


def test_a_store_that_hangs_up_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(port))

    def join() -> None:
        with watchdog.meeting():
            raise dist.DistNetworkError("Connection reset by peer\nand more")

    told = f"rank 1 cannot connect .* reset by peer .*:{port}"
    with pytest.raises(UsageError, match=told) as error:
        join()
    assert "\n" not in str(error.value)


def test_other_errors_are_kept() -> None:
    with pytest.raises(RuntimeError, match="of the program"), watchdog.meeting():
        raise RuntimeError("of the program")
