"""Whole runs of ``megatron-npu train``, in processes forked from one that has imported the modules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import tiny, warm
from tests.support.tiny_models import WORDS

DOCUMENTED = Path(__file__).resolve().parents[2] / "examples" / "rapidformer"
MODULES = (  # not datasets, which reads HF_HOME as it is imported: what takes it most of its time
    "pyarrow.dataset?",
    "multiprocess.pool?",
    "torch._dynamo",  # torch's first optimizer imports it
    "megatron_npu.finetune.run.command",
    "megatron_npu.finetune.rapidformer.templates",
    "transformers.models.bert.modeling_bert",
    "transformers.data.data_collator",
)


def train(*arguments: object, processes: int = 1, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``megatron-npu train``, which starts its own processes, to its end."""
    command = [sys.executable, "-m", "megatron_npu", "train", *map(str, arguments)]
    return warm.run(
        [*command, "--nproc-per-node", str(processes)],
        env={**tiny.environment(), "HF_HUB_OFFLINE": "1", **environment},
        modules=MODULES,
        capture_output=True,
        text=True,
        check=False,
    )


def losses(folder: Path) -> list[float]:
    """Return the training loss of each iteration of a run that saved into a folder."""
    rows = tiny.rows(folder / "metrics.jsonl")
    return [loss for row in rows for loss in row["losses"]]


def evaluations(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the results of a run's evaluations, by iteration."""
    return {row["iteration"]: row for row in tiny.rows(folder / "metrics.jsonl", "validation")}


def glue(folder: Path, *, train: int = 48, validation: int = 19) -> Path:
    """Write a dataset in the format of GLUE's MRPC on the hub: sentence pairs that are equivalent or not."""
    sizes = {"train": train, "validation": validation, "test": 5}
    head = ["---", "configs:", "- config_name: mrpc", "  data_files:"]
    (folder / "mrpc").mkdir(parents=True)
    for part, size in sizes.items():
        head += [f"  - split: {part}", f"    path: mrpc/{part}.jsonl"]
        rows = [_row(number + 1000 * len(part)) for number in range(size)]
        (folder / "mrpc" / f"{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "README.md").write_text("\n".join([*head, "---", ""]))
    return folder


def _row(number: int) -> dict[str, Any]:
    words = [WORDS[(number * step + step) % len(WORDS)] for step in (3, 7, 11, 2 + number % 3)]
    same = number % 2
    other = words if same else [*words[::-1], WORDS[number % len(WORDS)]]
    return {"idx": number, "sentence1": " ".join(words), "sentence2": " ".join(other), "label": same}
