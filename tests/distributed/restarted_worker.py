"""``megatron-npu pretrain`` whose rank 1 is killed once, at iteration 4, and not again after a restart."""

from __future__ import annotations

import os
import signal
import sys

from megatron_npu.pretrain.flags import arguments
from megatron_npu.pretrain.run import pretrain


def kill(iteration: int, model: object) -> None:
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], iteration) == ("1", "0", 4):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    pretrain.train(arguments.parse(sys.argv[1:]), on_gradients=kill)
