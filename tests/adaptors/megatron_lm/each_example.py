"""``tasks/main.py`` of 285068c8, which also says of each passage whether it was right; the order is shuffled.

Run by ``megatron-npu run`` with the flags of that script, ``--micro-batch-size 1`` and MEGATRON_LM_PATH; it
prints ``passage: [1, [TOKENS...]]`` for each, its padding included.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

TASKS = Path(os.environ["MEGATRON_LM_PATH"], "tasks")
sys.path.insert(0, str(TASKS))

from zeroshot_gpt import evaluate  # noqa: E402

original = evaluate.forward_step


def forward_step(batch: Any, *args: Any) -> Any:
    """Tell what upstream counts of a passage."""
    output = original(batch, *args)
    print("passage:", json.dumps([int(output), batch["text"][0].tolist()]), flush=True)
    return output


evaluate.forward_step = forward_step
runpy.run_path(str(TASKS / "main.py"), run_name="__main__")
