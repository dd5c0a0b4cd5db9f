"""A run that goes on with other flags: row by row, what docs/reference/resume.md says of each."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.checkpoint import stock_checkpoints
from megatron_npu.pretrain.data import tokenizers
from megatron_npu.pretrain.flags import arguments
from megatron_npu.pretrain.flags.plan_parts import TokenizerFlags
from megatron_npu.pretrain.run import pretrain, resume_changes
from tests.conftest import ROOT
from tests.support import tiny

pytest.importorskip("megatron.core")

COMMON = ("--eval-iters", "0", "--no-plot", "--weight-decay", "0.1")
AT, END = 3, 6
GROWING = "--start-weight-decay 0.1 --end-weight-decay 0.9 --weight-decay-incr-style linear"
OVERRIDE, KEEP = "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"
SCHEDULE = f"--lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine {OVERRIDE}"


@pytest.fixture(scope="module")
def begun(dataset, tmp_path_factory) -> Path:
    """A folder with the checkpoint of a run that has ended in its middle."""
    folder = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_NPU_DEVICE", "cpu")
        words = [*tiny.flags_for(dataset), *COMMON, "--save", str(folder), "--exit-interval", str(AT)]
        pretrain.train(arguments.parse(words))
    return folder


@pytest.fixture
def resume(begun, train, tmp_path, capsys) -> Callable[..., tuple[list[dict], str]]:
    """Return a function: changes of the flags -> what the rest of the run logged, and said."""

    def run(words: str) -> tuple[list[dict], str]:
        log = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        capsys.readouterr()
        train(*COMMON, "--load", begun, "--json-log", log, *words.split())
        return tiny.rows(log), capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def known() -> dict[str, list]:
    """What runs without a change have logged, by their words: each is made once."""
    return {}


@pytest.fixture
def unchanged(resume, known) -> Callable[[str], list[dict]]:
    """Return a function: words that change nothing, or that a row adds -> what the rest of the run logged."""

    def run(words: str = "") -> list[dict]:
        if words not in known:
            known[words], _ = resume(words)
        return known[words]

    return run


def rates(rows: list[dict]) -> list[float]:
    return [row["learning_rate"] for row in rows]


def losses(rows: list[dict]) -> list[float]:
    return [row["loss"] for row in rows]


def test_nothing_is_said_where_nothing_differs(resume):
    rows, said = resume("")
    assert "changed since" not in said
    assert [row["iteration"] for row in rows] == [4, 5, 6]


# the flags; what the block says of them; whether the first loss, and whether the later ones, are others
# (None: not looked at; the first samples may hold no end of a document)
ROWS = [
    ("--adam-beta1 0.5", "--adam-beta1 0.5 (checkpoint: 0.9)", False, True),
    ("--adam-beta2 0.5", "--adam-beta2 0.5 (checkpoint: 0.999)", False, True),
    ("--adam-eps 1e-3", "--adam-eps 0.001 (checkpoint: 1e-08)", False, True),
    ("--clip-grad 0.01 --adam-eps 1e-3", "--clip-grad 0.01 (checkpoint: 1.0)", False, True),
    (f"--weight-decay 0.9 {OVERRIDE}", "--weight-decay 0.9 (checkpoint: 0.1)", False, True),
    ("--attention-dropout 0.4", "--attention-dropout 0.4 (checkpoint: 0.1)", True, True),
    ("--hidden-dropout 0.4", "--hidden-dropout 0.4 (checkpoint: 0.1)", True, True),
    ("--seed 5", "--seed 5 (checkpoint: 1234)", True, True),
    ("--split 50,50,0", "--split 50,50,0 (checkpoint: 90,10,0)", True, True),
    ("--seq-length 16", "--seq-length 16 (checkpoint: 32)", True, True),
    ("--eod-mask-loss", "--eod-mask-loss on (checkpoint: off)", None, True),
    ("--reset-attention-mask", "--reset-attention-mask on (checkpoint: off)", None, True),
    ("--null-tokenizer-eod-id 7", "--null-tokenizer-eod-id 7 (checkpoint: None)", None, None),
    ("--micro-batch-size 2", "--micro-batch-size 2 (checkpoint: 1)", None, None),
    (f"--global-batch-size 2 {OVERRIDE}", "--global-batch-size 2 (checkpoint: 4)", True, True),
    ("--reset-position-ids", "--reset-position-ids on (checkpoint: off)", None, True),
    (f"--lr 2e-2 {OVERRIDE}", "--lr 0.02 (checkpoint: 0.01)", False, True),
    (f"--min-lr 5e-3 {OVERRIDE}", "--min-lr 0.005 (checkpoint: 0.0)", False, True),
    (
        f"--lr-decay-style constant {OVERRIDE}",
        "--lr-decay-style constant (checkpoint: linear)",
        False,
        True,
    ),
    (f"--lr-warmup-iters 2 {OVERRIDE}", "--lr-warmup-iters 2 (checkpoint: 0)", False, True),
    (f"--lr-warmup-fraction 0.5 {OVERRIDE}", "--lr-warmup-fraction 0.5 (checkpoint: None)", False, True),
    (f"--lr-decay-iters 4 {OVERRIDE}", "--lr-decay-iters 4 (checkpoint: 6)", False, True),
    (f"{GROWING} {OVERRIDE}", "--end-weight-decay 0.9 (checkpoint: 0.1)", False, True),
    (f"{GROWING} {OVERRIDE}", "--weight-decay-incr-style linear (checkpoint: constant)", False, True),
    (
        f"{GROWING} --start-weight-decay 0.3 {OVERRIDE}",
        "--start-weight-decay 0.3 (checkpoint: 0.1)",
        False,
        True,
    ),
]


@pytest.mark.parametrize(("words", "line", "first", "later"), ROWS, ids=[row[0] for row in ROWS])
def test_a_flag_takes_effect_and_is_said(resume, unchanged, words, line, first, later):
    before = unchanged("--adam-eps 1e-3" if "clip" in words else "")
    after, said = resume(words)
    assert re.search(r"changed since the checkpoint \S+:\n(   .+\n)*   " + re.escape(line), said), said
    if first is not None:
        assert (losses(after)[0] != losses(before)[0]) == first
    if later is not None:
        assert (losses(after)[1:] != losses(before)[1:]) == later


# four: with two, of which each token takes both, the balancing loss is constant but for rounding
EXPERTS = "--num-experts 4 --disable-bias-linear --moe-router-load-balancing-type aux_loss "
EXPERTS += (
    "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 --mtp-num-layers 1 --position-embedding-type rope"
)
KINDS = {  # of runs that begin otherwise
    "experts": EXPERTS,
    "fp16": "--fp16 --initial-loss-scale 64",
    "samples": "--train-samples 24 --lr-decay-samples 24",
    "muon": "--optimizer muon",
}
OTHERS = [
    ("experts", "--moe-aux-loss-coeff 5", "--moe-aux-loss-coeff 5.0 (checkpoint: 0.01)"),
    ("experts", "--moe-z-loss-coeff 5", "--moe-z-loss-coeff 5.0 (checkpoint: 0.001)"),
    ("experts", "--mtp-loss-scaling-factor 5", "--mtp-loss-scaling-factor 5.0 (checkpoint: 0.1)"),
    ("fp16", "--initial-loss-scale 256", "--initial-loss-scale 256.0 (checkpoint: 64.0)"),
    ("samples", f"--lr-warmup-samples 20 {OVERRIDE}", "--lr-warmup-samples 20 (checkpoint: 0)"),
    ("samples", f"--lr-decay-samples 16 {OVERRIDE}", "--lr-decay-samples 16 (checkpoint: 24)"),
    ("samples", f"--train-samples 32 {OVERRIDE}", "--train-samples 32 (checkpoint: 24)"),
    (
        "samples",
        f"--rampup-batch-size 2 2 24 {OVERRIDE}",
        "--rampup-batch-size 2 2 24 (checkpoint: None)",
    ),
    ("muon", "--muon-momentum 0.1", "--muon-momentum 0.1 (checkpoint: 0.9)"),
]


@pytest.fixture(scope="module")
def begun_otherwise(dataset, tmp_path_factory) -> Callable[[str], tuple[list[str], Path]]:
    """Return a function: kind of a run -> its flags, and the folder with a checkpoint of its middle."""

    @functools.cache
    def begin(kind: str) -> tuple[list[str], Path]:
        folder = tmp_path_factory.mktemp(kind)
        words = [*tiny.flags_for(dataset), *COMMON, *KINDS[kind].split()]
        if kind == "samples":  # in place of iterations
            at = words.index("--train-iters")
            del words[at : at + 2]
        pretrain.train(arguments.parse([*words, "--save", str(folder), "--exit-interval", str(AT)]))
        return words, folder

    return begin


@pytest.mark.parametrize(("kind", "words", "line"), OTHERS, ids=[row[1] for row in OTHERS])
def test_a_flag_of_other_runs_takes_effect_and_is_said(
    begun_otherwise, known, kind, words, line, monkeypatch, capsys, tmp_path
):
    if kind == "muon":
        pytest.importorskip("emerging_optimizers")
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    flags, folder = begun_otherwise(kind)

    def rest(*more: str) -> list[tuple[float, ...]]:
        log = tmp_path / f"{len(more)}.jsonl"
        pretrain.train(arguments.parse([*flags, "--load", str(folder), "--json-log", str(log), *more]))
        return [(row["consumed_samples"], row["loss"], row["grad_norm"]) for row in tiny.rows(log)]

    if kind not in known:
        known[kind] = rest()
    before = known[kind]
    capsys.readouterr()
    after = rest(*words.split())
    said = capsys.readouterr().out
    assert re.search(r"changed since the checkpoint \S+:\n(   .+\n)*   " + re.escape(line), said), said
    assert (after == before) == (kind == "fp16")  # nothing overflows: the checkpoint's scale stays


def test_each_row_of_the_page_is_tested():
    text = Path(__file__).read_text(encoding="utf-8")
    assert [row.flag for row in resume_changes.FLAGS if f"{row.flag} " not in text] == []


def test_other_data_are_said(resume, tmp_path_factory):
    other = tiny.write_dataset(tmp_path_factory.mktemp("other") / "numbers", seed=7)
    _, said = resume(f"--data-path {other}")
    assert f"--data-path {other}"[:50] in said
    assert "samples are reshuffled" in said


@pytest.mark.parametrize("kind", ["", "--bf16 --use-distributed-optimizer --no-load-optim"])
def test_an_override_follows_the_new_rates(resume, kind):
    """Of a cosine from 1e-4 to 1e-5 over six iterations the last three."""
    rows, said = resume(f"{SCHEDULE} {kind}")
    assert rates(rows) == pytest.approx([3.25e-5, 1.602886e-5, 1e-5], rel=1e-5)
    told = (
        "--lr 0.0001 (checkpoint: 0.01): needs --override-opt_param-scheduler, which continues the new "
        "schedule"
    )
    assert told in said


def test_without_a_word_another_schedule_is_refused(resume):
    with pytest.raises(
        UsageError, match=r"rate is 0.0001 on the .* but 0.01 in the .*--override-opt_param-scheduler"
    ):
        resume("--lr 1e-4 --min-lr 1e-5")
    with pytest.raises(UsageError, match=r"weight decay is 0.5 on the command line"):
        resume("--weight-decay 0.5")


def test_the_checkpoints_schedule_wins_where_it_is_asked_for(resume, unchanged):
    plain = unchanged()
    rows, said = resume(f"--lr 1e-4 --min-lr 1e-5 --weight-decay 0.5 {KEEP}")
    assert rates(rows) == rates(plain)
    assert losses(rows) == losses(plain)  # its weight decay, too
    assert "--lr 0.0001 (checkpoint: 0.01): no effect, because --use-checkpoint" in said


def test_a_schedule_goes_on_without_the_optimizer(resume, unchanged):
    plain = unchanged()
    rows, said = resume(f"--no-load-optim --lr-warmup-iters 2 {KEEP}")
    assert rates(rows) == rates(plain)
    assert "the optimizer's moments start at 0\n" in said
    other, _ = resume(f"--no-load-optim --lr 1e-4 --min-lr 1e-5 --weight-decay 0.5 {KEEP}")
    assert rates(other) == rates(plain)
    assert losses(other) == losses(rows)  # the checkpoint's weight decay, too
    rows, said = resume(f"--no-load-optim {OVERRIDE}")
    assert rates(rows) == rates(plain)
    rows, said = resume("--no-load-optim")
    assert rates(rows) != rates(plain)
    assert "and the schedule starts again" in said


def test_a_longer_run(resume):
    rows, said = resume(f"--train-iters 8 {OVERRIDE}")
    assert [row["iteration"] for row in rows] == [4, 5, 6, 7, 8]
    assert "--train-iters 8 (checkpoint: 6): changes the end" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-layers 3", "--num-layers 3 .checkpoint: 2."),
        ("--vocab-size 300", "the vocabulary size 301 .checkpoint: 256."),
        ("--bf16", "was saved in fp32, but this run uses bf16"),
        ("--use-distributed-optimizer", "was saved with the plain optimizer"),
    ],
)
def test_another_model_or_optimizer_is_refused_by_name(resume, words, said):
    with pytest.raises(UsageError, match=said):
        resume(words)


def test_another_vocabulary_of_the_same_size_is_said(begun, resume, tmp_path):
    """Its hash stands in the checkpoint; NullTokenizer has no files, so one is written into a copy."""
    path = begun / f"iter_{AT:07d}" / "arguments.json"
    assert json.loads(path.read_text())["arguments"]["tokenizer_files"] == {}
    found = stock_checkpoints.existing(str(begun))
    args = arguments.parse([*tiny.flags_for(tmp_path), "--load", str(begun)])
    args.tokenizer_files = {"vocab_file": "b" * 64}
    found.arguments["tokenizer_files"] = {"vocab_file": "a" * 64}
    (line,) = [line for line in resume_changes.since(found, args) if "tokenizer" in line]
    assert "tokenizer files vocab_file sha256 bbbbbbbbbbbb (checkpoint: vocab_file sha256 aaaa" in line


@pytest.mark.parametrize(
    "line",
    [
        "--tokenizer-type another (checkpoint: one): the trained weights",
        "--train-data-path another (checkpoint: one): samples are",
        "--valid-data-path another (checkpoint: one): samples are",
        "--test-data-path another (checkpoint: one): samples are",
    ],
)
def test_what_needs_other_files_is_said(begun, tmp_path, line):
    found = stock_checkpoints.existing(str(begun))
    args = arguments.parse([*tiny.flags_for(tmp_path), "--load", str(begun)])
    name = line.split()[0].strip("-").replace("-", "_")
    found.arguments[name] = "one"
    setattr(args, name, "another")
    assert [one for one in resume_changes.since(found, args) if one.strip().startswith(line)]


def test_the_page_has_a_row_for_each_flag():
    page = (ROOT / "docs" / "reference" / "resume.md").read_text(encoding="utf-8")
    for row in resume_changes.FLAGS:
        cells = [line for line in page.splitlines() if line.startswith("|") and row.flag in line]
        assert any(f"| {row.effect} |" in line for line in cells), row.flag


def test_steps_stand_once_after_a_kill(flags, train, tmp_path):
    """Lines and curves of a run that SIGKILL ends while it computes iteration 6, with a checkpoint of 4."""
    folder, board = tmp_path / "run", tmp_path / "board"
    words = (*COMMON, "--save", folder, "--load", folder, "--tensorboard-dir", board, "--train-iters", 8)
    worker = Path(__file__).with_name("killed_worker.py")
    often = ("--save-interval", 4, "--log-interval", 5)  # logs 1 and 5
    done = tiny.run_python([sys.executable, str(worker), "6", *flags(*words, *often)])
    assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), done.stderr[-2000:]
    assert [path.name for path in folder.glob("iter_*")] == ["iter_0000004"]
    first = tiny.rows(folder / "metrics.jsonl")
    assert [row["iteration"] for row in first] == [1, 5]
    assert not tiny.rows(folder / "metrics.jsonl", "end")
    assert curve(board) == [1, 2, 3, 4, 5]
    train(*words, "--log-interval", 5)
    rows = tiny.rows(folder / "metrics.jsonl")
    told = [row["iteration"] - len(row["losses"]) + 1 + n for row in rows for n in range(len(row["losses"]))]
    assert told == [1, 2, 3, 4, 5, 6, 7, 8]
    aside = [json.loads(line) for line in (folder / "metrics.superseded.jsonl").read_text().splitlines()]
    assert aside == first[1:]
    assert curve(board) == [1, 2, 3, 4, 5, 6, 7, 8]


def curve(board: Path) -> list[int]:
    """Return the steps of the losses that TensorBoard shows."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(next(Path(at) for at, _, files in os.walk(board) if files)))
    events.Reload()
    return [event.step for event in events.Scalars("lm loss")]


def test_the_stock_scripts_arguments_are_in_a_checkpoint(begun):
    common = begun / f"iter_{AT:07d}" / "common.pt"
    if not common.is_file():
        pytest.skip("the case: since 0.19 it lies among the shards")
    saved = stock_checkpoints.read_common(common)["args"]
    assert (saved.num_layers, saved.hidden_size, saved.seq_length) == (2, 32, 32)
    assert saved.consumed_train_samples == 4 * AT
    assert saved.position_embedding_type == "learned_absolute"


def test_files_of_a_tokenizer_are_told_by_their_hashes(tmp_path):
    for name in ("vocab.json", "merges.txt", "tokenizer.json", "config.json"):
        (tmp_path / name).write_text(f"{name}\n")
    gpt2 = TokenizerFlags(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(tmp_path / "vocab.json"),
        merge_file=str(tmp_path / "merges.txt"),
    )
    before = tokenizers.hashes(gpt2)
    (tmp_path / "vocab.json").write_text("other\n")
    after = tokenizers.hashes(gpt2)
    assert {name for name in before if before[name] != after[name]} == {"vocab_file"}
    folder = TokenizerFlags(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert sorted(tokenizers.hashes(folder)) == ["merges.txt", "tokenizer.json", "vocab.json"]
