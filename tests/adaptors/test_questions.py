"""``tasks/orqa`` of every tree that has it: answers of a file are read, never evaluated."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import checkout
from tests.support import warm

TREES = {
    "285068c8": ("megatron_lm", "unsupervised"),
    "0.12.1": ("megatron_core", "unsupervised"),
    "4efb479d": ("megatron_deepspeed_core", "unsupervised"),
    "8387ae17": ("megatron_deepspeed", "natural_questions"),
}
PROGRAM = """
import sys
from tasks.orqa.{part}.nq import NQDataset
for file in sys.argv[1:]:
    print(NQDataset.process_samples_from_single_path(file))
"""


@pytest.mark.parametrize("tree", TREES)
def test_answers_are_not_evaluated(tree: str, tmp_path: Path) -> None:
    name, part = TREES[tree]
    (tmp_path / "program.py").write_text(PROGRAM.format(part=part))
    (tmp_path / "good.tsv").write_text("where is the tower\t['Paris', \"Paris, France\"]\n")
    mark = tmp_path / "mark"
    (tmp_path / "bad.tsv").write_text(f"where\t['Paris']\nwho\topen({str(mark)!r}, 'w') and ['x']\n")
    environment = os.environ | {"MEGATRON_LM_PATH": str(checkout(name, tree))}

    command = [sys.executable, "-m", "megatron_npu", "run", "program.py", "good.tsv", "bad.tsv"]
    done = warm.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert not mark.exists()
    assert "'answers': ['Paris', 'Paris, France']" in done.stdout
    assert done.returncode == 2, done.stderr
    assert "bad.tsv, line 2 must contain a question" in done.stderr
    assert "Traceback" not in done.stderr
