"""The first command of docs/tutorials/quick-start-npu.md, as it stands there."""

from __future__ import annotations

import os
import sys

from megatron_npu.base import settings
from tests.conftest import LONGEST
from tests.support import processes, tiny, walk, warm

PAGE = tiny.ROOT / "docs" / "tutorials" / "quick-start-npu.md"


def test_the_doctor_finds_simulated_npus_well(simulated, tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    words = walk.commands_of_page(text)[0].split()
    assert words == "megatron-npu sim --devices 2 -- megatron-npu doctor".split()
    own = {name: value for name, value in os.environ.items() if name != settings.DEVICE.name}
    own |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tiny.ROOT)}
    # the doctor and the five processes that it starts are forks, which is a fifth of their time;
    # tests/unit/test_python_child.py lets all of a doctor start from nothing
    npus = own | {settings.SIM_DEVICES.name: "2"}
    [program], env = warm.simulated([sys.executable], npus, warm.DRIVER)
    del env[settings.SIM_DEVICES.name]
    launcher, doctor = ([each, "-m", "megatron_npu"] for each in (sys.executable, program))
    command = [*launcher, *words[1:4], "--", *doctor, *words[-1:]]
    done = processes.run(
        command,
        env={**env, **warm.WARM_CHILDREN, "TORCH_EXTENSIONS_DIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "is expected to work" in done.stdout.partition("\nadvice\n")[2]
    shown = text.partition("output includes these lines")[2].split("```")[1]
    printed = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in filter(None, map(str.strip, shown.replace("…", "").splitlines())):
        words = " ".join(line.split()).replace("65536", "")
        assert any(all(w in row for w in words.split()) for row in printed), line
