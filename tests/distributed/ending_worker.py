"""One rank of a run whose time is over on the last rank alone: ending_worker.py FLAGS...

The last rank's clock leaps by an hour while its second gradients are computed.
"""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

from megatron_npu.pretrain.flags import arguments
from megatron_npu.pretrain.run import initialize, pretrain, termination


def main() -> None:
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    vars(termination)["time"] = clock

    def leap(iteration: int, chunks: list) -> None:
        if iteration == 2 and os.environ["RANK"] == "1":
            ahead[0] = 3600.0

    initialize.silence_known_warnings()
    pretrain.train(arguments.parse(sys.argv[1:]), on_gradients=leap)


if __name__ == "__main__":
    main()
