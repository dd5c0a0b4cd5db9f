"""Other stock scripts: BERT and T5; and what a termination signal does."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.adaptors.megatron_lm.test_runs import TP2, deviation
from tests.conftest import LONGEST, on_a_leash, wait_until
from tests.support import stock_lm, tiny, warm


@pytest.mark.parametrize(("script", "own"), [(stock_lm.BERT, ""), (stock_lm.T5, "--use-flash-attn")])
def test_bert_and_t5(checkout, data, script, own):
    """Masks of padding, cross-attention, samples of sentences: as with upstream's operations, and at TP 2."""
    stock_lm.write_sentences(data)
    flags = [*stock_lm.sentence_flags(data, script), "--train-iters", "6"]
    stock = stock_lm.run(checkout / script, flags, with_operations=False)
    expected = stock_lm.losses(stock_lm.succeeded(stock))
    for processes, layout in ((1, ""), (2, TP2)):
        result = stock_lm.run(checkout / script, [*flags, *f"{own} {layout}".split()], processes=processes)
        assert deviation(stock_lm.losses(stock_lm.succeeded(result)), expected) < 1e-4


def test_a_termination_signal_saves(checkout, data, tmp_path):
    """--exit-signal-handler: SIGTERM to torchrun, which passes it on, saves and ends the training."""
    flags = [*stock_lm.flags(data), *"--train-iters 100000 --lr-decay-iters 100000".split()]
    flags += ["--exit-signal-handler", "--save", str(tmp_path), "--save-interval", "100000"]
    entry = ["-m", "megatron_npu", "run", str(checkout / "pretrain_gpt.py")]
    log = tmp_path / "log"
    command, env = warm.ready(
        [sys.executable, "-u", *tiny.torchrun(1), *entry, *flags],
        stock_lm.environment(PYTHONUNBUFFERED="1"),
        warm.STOCK,
        checkout,
    )
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=env, stdout=stream, stderr=subprocess.STDOUT)
    with on_a_leash(process):
        wait_until(lambda: "lm loss" in log.read_text(), process, lambda: log.read_text()[-3000:])
        process.send_signal(signal.SIGTERM)
        process.wait(LONGEST)
    assert "exiting program after receiving SIGTERM" in log.read_text()
    saved = (tmp_path / "latest_checkpointed_iteration.txt").read_text()
    assert (tmp_path / f"iter_{int(saved):07d}" / "mp_rank_00" / "model_optim_rng.pt").is_file()
