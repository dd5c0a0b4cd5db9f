"""Console line, JSON lines and their way back, the formula of FLOPs."""

from __future__ import annotations

import gc
import io
import json
import math
import sys
from argparse import Namespace

import pytest

from megatron_npu.pretrain.flags.plan_parts import LogFlags, ModelSizes
from megatron_npu.pretrain.report import flops, history, log
from megatron_npu.pretrain.report.drawn_texts import Text


def row(**changes):
    values = {
        "consumed_samples": 40,
        "loss": 9.5,
        "grad_norm": 1.25,
        "learning_rate": 1e-3,
        "loss_scale": 1.0,
        "elapsed_ms": 12.5,
        "tokens_per_second": 1000.0,
        "tflops_per_device": 0.5,
        "peak_memory_bytes": 2**20,
        "utilization": 0.875,
        "skipped_iterations": 1,
        "nan_iterations": 0,
    }
    return values | changes


def test_the_line_has_the_fields_of_megatron():
    text = log.line(LogFlags(rank=0, train_iters=100, global_batch_size=4), 10, row())
    for part in (
        " iteration       10/     100 |",
        " consumed samples:           40 |",
        " elapsed time per iteration (ms): 12.5 |",
        " learning rate: 1.000000E-03 |",
        " global batch size:     4 |",
        " lm loss: 9.500000E+00 |",
        " loss scale: 1.0 |",
        " grad norm: 1.250 |",
        " number of skipped iterations:   1 |",
        " number of nan iterations:   0 |",
        " device utilization: 88% |",
    ):
        assert part in text
    assert "utilization" not in log.line(
        LogFlags(rank=0, train_iters=1, global_batch_size=4), 1, row(utilization=None)
    )


def test_the_line_of_a_simulated_device_says_so(monkeypatch):
    device = Namespace(simulated=True, title="simulated npu")
    monkeypatch.setattr(log.devices, "current", lambda: device)
    text = log.line(LogFlags(rank=0, train_iters=100, global_batch_size=4), 10, row())
    assert text.endswith("| simulated npu |")


def journal(tmp_path, iteration=0, rank=0):
    return log.Log(LogFlags(rank=rank, train_iters=9, json_log=str(tmp_path / "m.jsonl")), iteration)


def test_numbers_keep_their_digits_and_what_is_none_is_null(tmp_path):
    journal(tmp_path).write("train", 1, {"loss": 0.1 + 0.2, "losses": [math.nan, math.inf]})
    last = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[-1])
    assert last == {"event": "train", "iteration": 1, "loss": 0.1 + 0.2, "losses": [None, None]}


def test_other_ranks_write_nothing(tmp_path, capsys):
    other = journal(tmp_path, rank=1)
    other.say("hello")
    other.write("train", 1, {})
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


def test_history_goes_on_where_a_run_was_resumed(tmp_path):
    first = journal(tmp_path)
    common = {"learning_rate": 0.1, "tokens_per_second": 5.0}
    first.write("train", 2, {"losses": [3.0, 2.0], **common})
    first.write("train", 4, {"losses": [1.0, 0.5], **common})
    first.write("validation", 4, {"loss": 7.0, "perplexity": 1.0})
    again = journal(tmp_path, iteration=2)  # iterations 3 and 4 were lost
    again.write("train", 3, {"losses": [1.5], "learning_rate": 0.2, "tokens_per_second": 6.0})
    with open(tmp_path / "m.jsonl", "a") as stream:
        stream.write('3\n{"event": "strange"}\n{"event": "train", "iterat')  # killed while writing
    past = history.read(tmp_path / "m.jsonl")
    assert past.losses == {1: 3.0, 2: 2.0, 3: 1.5}
    assert past.learning_rates == {2: 0.1, 3: 0.2}
    assert past.throughput == {2: 5.0, 3: 6.0}
    assert past.validation == {}


def test_a_run_that_goes_on_after_one_that_was_killed_in_a_line_is_read(tmp_path):
    common = {"learning_rate": 0.1, "tokens_per_second": 5.0}
    journal(tmp_path).write("train", 3, {"losses": [3.0, 2.0, 1.0], **common})
    with open(tmp_path / "m.jsonl", "a") as stream:
        stream.write('{"event": "tra')
    journal(tmp_path, iteration=1).write("train", 2, {"losses": [2.5], **common})
    assert history.read(tmp_path / "m.jsonl").losses == {1: 3.0, 2: 2.5}


def test_a_reader_goes_on_where_it_was_and_sees_a_file_that_is_another(tmp_path):
    reader = history.Reader(tmp_path / "m.jsonl")
    assert not reader.update()
    log = journal(tmp_path)
    assert reader.update()
    assert not reader.update()
    with open(tmp_path / "m.jsonl", "a") as stream:
        stream.write('{"event": "validation", "iteration": 1, "lo')
        stream.flush()
        assert not reader.update()
        stream.write('ss": 5.0}\n')
    assert reader.update()
    assert reader.history.validation == {1: 5.0}
    log.end("signal")
    assert reader.update()
    assert reader.history.end["ended_by"] == "signal"
    (tmp_path / "m.jsonl").rename(tmp_path / "old")
    journal(tmp_path)
    assert reader.update()
    assert (reader.history.validation, reader.history.end) == ({}, {})


def test_a_sample_is_one_line_whatever_it_holds(tmp_path, capsys):
    journal(tmp_path).sample(3, Text("萧炎,", "one\ntwo\x1b[31m\x9b"))
    assert capsys.readouterr().out == " sample at iteration 3 | 萧炎,one\\ntwo\\x1b[31m\\x9b\n"
    row = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[-1])
    assert (row["prompt"], row["text"]) == ("萧炎,", "one\ntwo\x1b[31m\x9b")


def test_a_console_of_another_encoding_gets_escapes(tmp_path, monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    journal(tmp_path).sample(3, Text("萧", "a"))
    assert screen.buffer.getvalue() == rb" sample at iteration 3 | \u8427a" + b"\n"


def test_the_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    history.draw(
        history.History({1: 2.0, 2: 1.0}, {1: 0.1}, validation={2: 1.5}, evaluated={2: 1.2}),
        tmp_path / "p.png",
    )
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["p.png"]


def test_a_picture_leaves_no_figure_in_memory(tmp_path):
    """A long run draws hundreds, and Python's collector came for them after dozens."""
    pytest.importorskip("matplotlib")

    def figures():
        return [id(one) for one in gc.get_objects() if type(one).__name__ == "Figure"]

    before = figures()
    history.draw(history.History({1: 2.0, 2: 1.0}, {1: 0.1}), tmp_path / "p.png")
    assert set(figures()) <= set(before)
    assert gc.isenabled()


def test_flops_of_gpt2():
    sizes = ModelSizes(
        num_layers=12,
        expert_layers=[False] * 12,
        hidden_size=768,
        num_attention_heads=12,
        kv_channels=64,
        num_query_groups=12,
        ffn_hidden_size=3072,
        swiglu=False,
        seq_length=1024,
        padded_vocab_size=50304,
        global_batch_size=1,
    )
    # equation 3 of arXiv:2104.04473 without recomputation, with half of the attention as it is causal:
    # 72 B s l h² (1 + s/12h + V/12lh) for one forward and two backward passes
    h, s, layers, vocabulary = 768, 1024, 12, 50304
    expected = 72 * s * layers * h**2 * (1 + s / (12 * h) + vocabulary / (12 * layers * h))
    assert flops.of_step(sizes) == pytest.approx(expected)


def test_flops_of_latent_attention_and_a_further_layer():
    """The matrices by their shapes: ``--multi-latent-attention``, and ``--mtp-num-layers 1``."""
    latent = {
        "q_lora_rank": 6,
        "kv_lora_rank": 5,
        "qk_head_dim": 4,
        "qk_pos_emb_head_dim": 2,
        "v_head_dim": 3,
    }
    layer = {"num_layers": 1, "expert_layers": [False], "ffn_hidden_size": 32, "swiglu": True}
    sizes = ModelSizes(
        **latent,
        **layer,
        **{"mtp_num_layers": 1, "multi_latent_attention": True, "hidden_size": 16, "num_attention_heads": 2},
        **{"seq_length": 10, "padded_vocab_size": 64, "global_batch_size": 1},
    )
    matrices = [(16, 6), (6, 12), (16, 5 + 2), (5, 8 + 6), (6, 16), (16, 32), (16, 32), (32, 16), (16, 64)]
    products = sum(rows * columns for rows, columns in matrices)
    scores = (12 + 6) * 10 / 2  # with half of them, as the mask is causal
    assert flops.of_step(sizes) == 6 * 10 * (2 * (products + scores) + 32 * 16)
