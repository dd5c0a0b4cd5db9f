"""A rank of test_slow_copies.py. Usage: slow_copy_worker.py FOLDER STORAGE WHAT

Its collectives wait for three seconds. Rank 1 copies its part of a checkpoint for eight seconds (WHAT is
``slow``) or ends in the midst of it (``lost``). Prints where rank 0 stands after three seconds, and what
comes of it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem

from megatron_npu.checkpoint_files import disks, object_storage, patience
from megatron_npu.watchdog import place


def main(folder: str, storage: str, what: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    copied = LocalFileSystem.put_file

    def put_file(self, *args, **kwargs):
        if dist.get_rank() == 1:
            if what == "lost":
                os._exit(0)  # torchrun takes it for an end
            time.sleep(8)
        return copied(self, *args, **kwargs)

    LocalFileSystem.put_file = put_file
    patience._BEAT, patience._LOST = 0.5, 4.0
    disks.copy_to(storage)
    if dist.get_rank() == 0:
        look = threading.Timer(
            3, lambda: print("rank 0 is in", place.of_main_thread().collective, flush=True)
        )
        look.daemon = True
        look.start()
    try:
        object_storage.upload(Path(folder))
        print(f"rank {dist.get_rank()} goes on", flush=True)
    except RuntimeError as error:
        print(f"rank {dist.get_rank()} ends: {error}", flush=True)
        os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
