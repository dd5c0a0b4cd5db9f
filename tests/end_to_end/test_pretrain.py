"""The driver from flags to summary, on one process."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.conftest import LONGEST, wait_until
from tests.support import tiny, warm

pytest.importorskip("megatron.core")


def test_a_run_learns_validates_saves_and_reports(train, tmp_path, capsys):
    often = "--train-iters 30 --log-interval 10 --eval-interval 20".split()
    summary = train("--save", tmp_path, *often, "--plot")
    out = capsys.readouterr().out
    assert summary.loss_first == pytest.approx(math.log(256), abs=0.2)
    assert summary.loss_last < summary.loss_first - 0.5
    assert summary.validation_perplexity == pytest.approx(math.exp(summary.validation_loss))
    assert summary.iterations == 30
    assert summary.consumed_samples == 120
    assert summary.tokens_per_second > 0
    # console: Megatron's line at 1, 10, 20, 30; the ledger's line once at most; both validations
    assert [f"{n:8d}/      30 |" in out for n in (1, 2, 10, 20, 30)] == [True, False, True, True, True]
    assert out.count("validation loss at iteration") == 2
    # files
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"iter_0000030", "latest_checkpointed_iteration.txt", "metrics.jsonl", "summary.json"}
    assert "\ntrain-iters: 30\n" in (tmp_path / "config.yaml").read_text()
    assert json.loads((tmp_path / "summary.json").read_text())["loss_last"] == summary.loss_last
    assert Path(summary.plot).read_bytes().startswith(b"\x89PNG")
    lost = [path.name for path in tmp_path.rglob("*") if "partial" in path.name]
    assert lost == []


def test_every_loss_is_kept_whatever_the_log_interval(train, tmp_path):
    train("--json-log", tmp_path / "each", "--log-interval", 1)
    train("--json-log", tmp_path / "all", "--log-interval", 6)
    each = [row["losses"][0] for row in tiny.rows(tmp_path / "each")]
    together = [loss for row in tiny.rows(tmp_path / "all") for loss in row["losses"]]
    assert each == together
    assert len(each) == 6


def test_a_deterministic_run_is_the_same_to_the_bit(train, tmp_path):
    """Dropout, and an embedding whose gradient is summed: weights of two runs."""
    weights = []

    def look(iteration, model):
        assert torch.are_deterministic_algorithms_enabled()
        assert model[0].config.deterministic_mode
        weights.append([parameter.detach().clone() for parameter in model[0].parameters()])

    flags = "--deterministic-mode --train-iters 2 --eval-iters 0 --attention-dropout 0.1".split()
    for _ in range(2):
        train(*flags, on_gradients=look)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.equal(weights[0][0], weights[1][0])  # it has learnt
    for first, again in zip(weights[0] + weights[1], weights[2] + weights[3], strict=True):
        assert torch.equal(first, again)


def test_parameters_are_counted_as_they_are(train, tmp_path):
    seen = {}

    def count(iteration, model):
        sizes = {name: weight.numel() for chunk in model for name, weight in chunk.named_parameters()}
        body = (size for name, size in sizes.items() if not re.search("embedding|output_layer", name))
        seen[iteration] = sum(sizes.values()), sum(body)

    kinds = (
        [],
        "--swiglu --normalization RMSNorm --disable-bias-linear".split(),
        "--untie-embeddings-and-output-weights".split(),
        "--group-query-attention --num-query-groups 2 --position-embedding-type rope --add-qkv-bias".split(),
        "--qk-layernorm --disable-bias-linear".split(),
    )
    for kind in kinds:
        summary = train("--train-iters", 1, "--eval-iters", 0, *kind, on_gradients=count)
        assert (summary.parameters, summary.parameters_without_embeddings) == seen[1], kind


def test_gradients_can_be_looked_at(train):
    norms = []

    def look(iteration, model):
        gradients = [parameter.main_grad for parameter in model[0].parameters()]
        norms.append(float(torch.stack([gradient.double().norm() for gradient in gradients]).norm()))

    train("--train-iters", 2, "--eval-iters", 0, on_gradients=look)
    assert len(norms) == 2
    assert all(0 < norm < 100 for norm in norms)


def test_evaluation_changes_nothing_of_the_training(train, tmp_path):
    train("--json-log", tmp_path / "with", "--eval-interval", 1, "--eval-iters", 3)
    train("--json-log", tmp_path / "without", "--eval-iters", 0)
    assert tiny.losses(tmp_path / "with") == tiny.losses(tmp_path / "without")
    assert len(tiny.rows(tmp_path / "with", "validation")) == 6


def test_the_same_seed_gives_the_same_run_and_another_another(train, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train("--json-log", tmp_path / name, "--seed", seed, "--eval-iters", 0)
    a, b, c = (tiny.losses(tmp_path / name) for name in "abc")
    assert a == b
    assert a != c


def test_half_precision_stays_near(train, tmp_path):
    summaries = [
        train("--json-log", tmp_path / "m", "--attention-dropout", 0, "--hidden-dropout", 0, *flag)
        for flag in ([], ["--bf16"], ["--fp16", "--initial-loss-scale", "1024"])
    ]
    for summary in summaries[1:]:
        assert summary.loss_last == pytest.approx(summaries[0].loss_last, rel=1e-2)


def test_an_overflow_is_skipped_and_said(train, tmp_path, capsys):
    train("--fp16", "--json-log", tmp_path / "m", "--initial-loss-scale", 2.0**40, "--hysteresis", 1)
    first = tiny.rows(tmp_path / "m")[0]
    assert first["skipped_iterations"] == 1
    assert first["loss_scale"] == 2.0**39
    assert "iteration 1: the gradient overflowed" in capsys.readouterr().out


def test_a_diverged_run_ends_without_a_checkpoint(train, tmp_path):
    from megatron_npu.pretrain.run.loop import DivergedError

    with pytest.raises(DivergedError, match="gradient norm"):
        train("--save", tmp_path, "--lr", 1e30, "--clip-grad", 0)
    assert not list(tmp_path.glob("iter_*"))


def test_a_window_changes_the_loss_and_both_layouts_agree(train, tmp_path):
    quiet = ("--attention-dropout", 0, "--hidden-dropout", 0, "--eval-iters", 0)
    window = ("--pre-tockens", 3, "--next-tockens", 0)
    for name, changes in (("full", ()), ("sbh", window), ("bsh", (*window, "--shape-order", "BSH"))):
        train("--json-log", tmp_path / name, *quiet, *changes)
    full, sbh, bsh = (list(tiny.losses(tmp_path / name).values()) for name in ("full", "sbh", "bsh"))
    assert sbh == pytest.approx(bsh, rel=1e-5)
    assert max(abs(a - b) for a, b in zip(full, sbh, strict=True)) > 1e-4


def test_another_softmax_is_another_model(train, tmp_path):
    found = [train("--softmax-type", kind).loss_last for kind in ("vanilla", "off-by-one", "learnable")]
    assert len(set(found)) == 3
    assert found == pytest.approx([found[0]] * 3, rel=0.05)


def test_main_weights_without_a_copy_train_to_the_bit(train, tmp_path):
    """And go on from a checkpoint; moments and gradients in bf16 stay near."""
    plain = ("--bf16", "--use-distributed-optimizer", "--eval-iters", 0)
    train("--json-log", tmp_path / "plain", *plain)
    remainders = (*plain, "--reuse-fp32-param", "--save", tmp_path / "saved")
    train("--json-log", tmp_path / "first", *remainders, "--exit-interval", 3)
    train("--json-log", tmp_path / "rest", *remainders, "--load", tmp_path / "saved")
    narrow = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16".split()
    train("--json-log", tmp_path / "narrow", *plain, *narrow, "--main-grads-dtype", "bf16")
    expected, first, rest, near = (
        tiny.losses(tmp_path / name) for name in ("plain", "first", "rest", "narrow")
    )
    assert first | rest == expected
    assert near != expected
    assert list(near.values()) == pytest.approx(list(expected.values()), rel=2e-2)


def test_a_blend_and_mock_data(train, dataset, tmp_path):
    other = tiny.write_dataset(tmp_path / "other", seed=1)
    cache = ("--data-cache-path", tmp_path / "cache")
    assert train("--data-path", "0.3", dataset, "0.7", other, *cache).loss_last is not None


def test_tensorboard(train, tmp_path):
    pytest.importorskip("tensorboard")
    train("--tensorboard-dir", tmp_path / "tb")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [event.step for event in events.Scalars("lm loss")] == [1, 2, 3, 4, 5, 6]
    assert {"learning-rate", "grad-norm", "lm loss validation"} <= set(events.Tags()["scalars"])


def test_sigterm_saves_and_ends(flags, tmp_path):
    long = flags("--save", tmp_path, "--train-iters", 100_000, "--exit-signal-handler", "--eval-iters", 0)
    command, env = warm.ready(tiny.command("pretrain", *long), tiny.environment(), warm.DRIVER)
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        log = tmp_path / "metrics.jsonl"
        wait_until(lambda: log.exists() and '"iteration": 3' in log.read_text(), process)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=LONGEST)
    finally:
        process.kill()
    assert process.returncode == 0, out
    iteration = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert iteration >= 3
    assert (tmp_path / f"iter_{iteration:07d}" / "metadata.json").is_file()
    assert json.loads((tmp_path / "summary.json").read_text())["ended_by"] == "signal"


def test_a_finished_run_that_is_started_again_reports_the_same(train, tmp_path):
    first = train("--save", tmp_path, "--load", tmp_path)
    again = train("--save", tmp_path, "--load", tmp_path)
    assert (again.iterations, again.checkpoint) == (first.iterations, first.checkpoint)
    assert (again.loss_first, again.loss_last) == (first.loss_first, first.loss_last)
    assert again.tokens_per_second > 0
    assert again.validation_loss == pytest.approx(first.validation_loss, rel=0.2)
