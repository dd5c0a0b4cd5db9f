"""The first command of docs/tutorials/quick-start-npu.md, as it stands there."""

from __future__ import annotations

import os
import sys

from megatron_npu.base import settings
from tests.conftest import LONGEST
from tests.support import processes, tiny, walk

PAGE = tiny.ROOT / "docs" / "tutorials" / "quick-start-npu.md"


def test_the_doctor_finds_simulated_npus_well(simulated, tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    words = walk.commands_of_page(text)[0].split()
    assert words == "megatron-npu sim --devices 2 -- megatron-npu doctor".split()
    program = [sys.executable, "-m", "megatron_npu"]
    command = [word for w in words for word in (program if w == "megatron-npu" else [w])]
    own = {name: value for name, value in os.environ.items() if name != settings.DEVICE.name}
    done = processes.run(
        command,
        env={**own, "TORCH_EXTENSIONS_DIR": str(tmp_path), "PYTHONPATH": str(tiny.ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "can be expected to work" in done.stdout.partition("\nadvice\n")[2]
    shown = text.partition("The output includes")[2].split("```")[1]
    printed = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in filter(None, map(str.strip, shown.replace("…", "").splitlines())):
        words = " ".join(line.split()).replace("65536", "")
        assert any(all(w in row for w in words.split()) for row in printed), line
