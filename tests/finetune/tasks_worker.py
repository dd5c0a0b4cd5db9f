"""A rank that trains tasks, one after another: tasks_worker.py COMMANDS.json FOLDER

COMMANDS.json has the command line of each task; what rank 0 finds becomes FOLDER/TASK.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from tests.finetune import tasks_data


def main(commands: str, folder: str) -> None:
    """Train every task."""
    for task, argv in json.loads(Path(commands).read_text()).items():
        _, outcome = tasks_data.train(argv, stay=True)
        (evaluation,) = outcome.evaluations.values()
        if os.environ["RANK"] == "0":
            found = {"losses": outcome.losses, "evaluation": evaluation.metrics | {"loss": evaluation.loss}}
            (Path(folder) / f"{task}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
    dist.destroy_process_group()
