"""One rank of several runs, one after the other: writes the losses and gradient norms of each.

Usage: switch_worker.py CASES.json LOGS FLAGS..., with CASES {name: [flag, ...]}
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from megatron_npu import plugin
from megatron_npu.training import arguments, initialize, pretrain


def main() -> None:
    cases, logs, flags = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3:]
    plugin.install()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    initialize.silence_known_warnings()
    for name, words in cases.items():
        pretrain.train(arguments.parse([*flags, "--json-log", str(logs / name), *words]))


if __name__ == "__main__":
    main()
