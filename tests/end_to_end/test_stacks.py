"""``kill -USR1`` of a run prints where it stands, once, and the run goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import LONGEST, ROOT, on_a_leash
from tests.support import tiny, warm

SCRIPT = ROOT / "checkouts" / "core_v0.16.1" / "pretrain_gpt.py"
FOR_EVER = [
    *"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --lr 1e-2".split(),
    *"--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 1 --train-iters 200000".split(),
    *"--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1".split(),
    *"--eval-iters 1 --eval-interval 100000".split(),
]
OF_SCRIPT = ["--transformer-impl", "local", "--no-persist-layer-norm", "--no-gradient-accumulation-fusion"]


def until(file: Path, text: str, process: subprocess.Popen[bytes]) -> str:
    """Wait until a process has written a text into a file; return what is in there."""
    while text not in (said := file.read_text(errors="replace")):
        assert process.poll() is None, said
        time.sleep(0.1)
    return said


@pytest.mark.parametrize("what", ["driver", "stock script"])
def test_stacks_of_a_run_that_is_watched(what: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_npu"]
    if what == "driver":
        command, env = warm.ready([*command, "pretrain", *FOR_EVER], tiny.environment(), warm.DRIVER)
    elif not SCRIPT.is_file():
        pytest.skip("no checkouts/core_v0.16.1")
    else:
        command += ["run", str(SCRIPT), *FOR_EVER, *OF_SCRIPT]
        env = tiny.environment() | {"MEGATRON_LM_PATH": str(SCRIPT.parent)}
        command, env = warm.ready(command, env, warm.STOCK, SCRIPT.parent)
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr, cwd=tmp_path)
    with on_a_leash(process, LONGEST):
        until(out, "iteration        3/", process)
        process.send_signal(signal.SIGUSR1)
        said = until(err, "in <module>", process)
        steps = out.read_text().count("lm loss")
        while out.read_text().count("lm loss") < steps + 3:
            assert process.poll() is None, err.read_text()
            time.sleep(0.1)
        said = err.read_text()
    assert said.count("Current thread") == 1
    assert "megatron_npu/watchdog" in said  # of all threads
