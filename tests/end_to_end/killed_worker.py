"""A run that the kernel kills in the middle of an iteration: killed_worker.py ITERATION FLAGS...

TensorBoard's events are written at once, as those of a long run have been when it is killed.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time

from torch.utils import tensorboard

from megatron_npu.pretrain.flags import arguments
from megatron_npu.pretrain.run import initialize, pretrain


def main() -> None:
    last = int(sys.argv[1])
    vars(tensorboard)["SummaryWriter"] = functools.partial(tensorboard.SummaryWriter, flush_secs=0)

    def die(iteration: int, chunks: list) -> None:
        if iteration == last:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)

    initialize.silence_known_warnings()
    pretrain.train(arguments.parse(sys.argv[2:]), on_gradients=die)


if __name__ == "__main__":
    main()
