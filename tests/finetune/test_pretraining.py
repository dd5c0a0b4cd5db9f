"""Pre-training of Transformers' models on `.bin/.idx`: samples, the task, the document's script."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import indexed_dataset
from megatron_npu.finetune.data import word_pieces
from megatron_npu.finetune.run.flag_parts import MeetingFlags, PieceFlags
from tests.finetune import sentences
from tests.support import tiny, tiny_models, train_runs

pytest.importorskip("megatron.core")
SCRIPT = train_runs.DOCUMENTED / "rapidformer_pretrain_huggingface_bert_trainer.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Sentence-split data, its vocabulary, and a BERT and a GPT-2 that are configurations alone."""
    from transformers import BertConfig, GPT2Config

    place = tmp_path_factory.mktemp("pretraining")
    sentences.write_vocabulary(place / "vocab.txt")
    sentences.write(place / "text")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertConfig(vocab_size=85, max_position_embeddings=64, **sizes, **dropout).save_pretrained(place / "bert")
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    GPT2Config(vocab_size=86, n_positions=64, n_embd=32, n_layer=1, n_head=4, **none).save_pretrained(
        place / "gpt2"
    )
    return place


def flags_for(folder: Path, model: str = "bert") -> list[str]:
    """Return the flags of a run of 20 iterations."""
    vocabulary = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(folder / "vocab.txt")]
    numbers = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "85"]
    return [
        *["--task", "pretraining", "--pretrained-model-name-or-path", str(folder / model)],
        *["--data-path", str(folder / "text"), *(vocabulary if model == "bert" else numbers)],
        *"--data-impl mmap --split 90,10 --micro-batch-size 4 --global-batch-size 8 --lr 1e-2".split(),
        *"--train-iters 20 --seq-length 64 --eval-iters 1 --log-interval 1 --no-plot".split(),
    ]


@pytest.fixture
def run(monkeypatch):
    """Return a function: argv -> what has its flags and is alone in its process group."""
    from megatron_npu.finetune.rapidformer import engine, state
    from megatron_npu.finetune.run import arguments, ranks

    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")

    def begun(argv):
        args = arguments.parse(argv)
        args = arguments.with_ranks(args, ranks.Ranks())
        state.set_args(args)
        engine.meet(MeetingFlags.of(args))
        return args

    yield begun
    engine.leave()
    state.set_args(None)


def train(argv: list[str]):
    """Train in this process; return the flags."""
    from megatron_npu.finetune.run import arguments, command, ranks

    args = arguments.parse(argv)
    args = arguments.with_ranks(args, ranks.Ranks())
    command.train(args)
    return args


def pairs(folder, args, **changes):
    from megatron_npu.finetune import build_train_valid_test_datasets_for_huggingface as build

    given = {
        "data_prefix": args.data_path,
        "data_impl": "mmap",
        "splits_string": "90,10",
        "train_valid_test_num_samples": [60, 8, 8],
        "max_seq_length": 64,
        "masked_lm_prob": 0.15,
        "short_seq_prob": 0.0,
        "seed": 5,
        "skip_warmup": True,
        "binary_head": True,
    }
    return build(**given | changes)


def documents(prefix: Path) -> list[list[int]]:
    """Return the tokens of each document, all sentences behind each other."""
    lengths = indexed_dataset.sequence_lengths(prefix)
    tokens = torch.frombuffer(bytearray(Path(f"{prefix}.bin").read_bytes()), dtype=torch.uint16).tolist()
    ends = [int(sum(lengths[: last + 1])) for last in range(3, len(lengths), 4)]
    return [tokens[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def test_a_sample_is_a_masked_pair_of_a_document(folder, run):
    train_part, valid, test = pairs(folder, run(flags_for(folder)))
    assert (len(train_part) >= 60, len(valid) >= 8, test) == (True, True, None)
    pad, cls, sep, mask = (sentences.SPECIAL.index(f"[{name}]") for name in ("PAD", "CLS", "SEP", "MASK"))
    texts = ["-".join(map(str, ["", *text, ""])) for text in documents(folder / "text")]
    seen, masked = set(), 0
    for number in range(60):
        sample = train_part[number]
        assert {name: (value.dtype, list(value.shape)) for name, value in sample.items()} == {
            **dict.fromkeys(("input_ids", "attention_mask", "token_type_ids", "labels"), (torch.int64, [64])),
            "next_sentence_label": (torch.int64, []),
        }
        asked = sample["labels"] != -100
        whole = sample["labels"].where(asked, sample["input_ids"])
        length = int(sample["attention_mask"].sum())
        assert sample["attention_mask"].tolist() == [1] * length + [0] * (64 - length)
        assert whole[length:].tolist() == [pad] * (64 - length)
        assert not asked[length:].any()
        ids = whole[:length].tolist()
        assert (ids[0], ids[-1]) == (cls, sep)
        middle = ids.index(sep)
        assert sample["token_type_ids"].tolist() == [0] * (middle + 1) + [1] * (length - middle - 1) + [0] * (
            64 - length
        )
        first, second = ids[1:middle], ids[middle + 1 : -1]
        swapped = bool(sample["next_sentence_label"])
        joined = "-".join(map(str, ["", *(second + first if swapped else first + second), ""]))
        assert any(joined in text for text in texts), "a pair is of sentences that follow each other"
        begins = [place for place in range(length) if ids[place] >= 5 and ids[place] % 2]
        for place in begins:
            assert asked[place] == asked[place + 1], "a word is masked as a whole"
        seen |= {swapped}
        masked += int((sample["input_ids"][asked] == mask).sum())
        total = int(asked.sum())
        assert 1 <= total <= 0.15 * 64 + 2 * 3
    assert seen == {False, True}
    assert masked > 60


def test_samples_are_those_of_the_seed(folder, run):
    args = run(flags_for(folder))
    one, same, other = (pairs(folder, args, seed=seed)[0][3]["input_ids"] for seed in (5, 5, 6))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_without_the_head_a_sample_is_one_text(folder, run):
    sample = pairs(folder, run(flags_for(folder)), binary_head=False)[0][0]
    assert sorted(sample) == ["attention_mask", "input_ids", "labels", "token_type_ids"]
    assert not sample["token_type_ids"].any()


def test_data_that_make_no_pairs_are_refused(folder, run, tmp_path):
    sentences.write(tmp_path / "single", sentences=1)
    args = run(flags_for(folder))
    with pytest.raises(UsageError, match="--split-sentences"):
        pairs(folder, args, data_prefix=str(tmp_path / "single"))
    with pytest.raises(UsageError, match="leaves none of the 40 documents"):
        pairs(folder, args, splits_string="999,1")
    pairs(folder, args, data_impl="lazy")  # the files tell which format it is
    args.vocab_file = str(tmp_path / "small.txt")
    Path(args.vocab_file).write_text("\n".join([*sentences.SPECIAL, "a", "##b"]))
    with pytest.raises(UsageError, match=r"text\.bin"):
        pairs(folder, args)


def test_windows_of_a_causal_model_ask_for_every_token_once(folder, run):
    from megatron_npu.finetune.data.mmap_datasets import build_causal_datasets_for_huggingface as build

    prefix = tiny.write_dataset(folder / "numbers", documents=20)
    run([*flags_for(folder, "gpt2"), "--vocab-size", "255"])
    samples = (int(indexed_dataset.sequence_lengths(prefix).sum()) - 1) // 15  # of one epoch
    windows, _, _ = build(str(prefix), "mmap", "100,0,0", [samples, 0, 0], 16, seed=1)
    assert all(torch.equal(window["input_ids"], window["labels"]) for window in windows)
    asked = [tuple(pair) for number in range(samples) for pair in _steps(windows[number]["labels"])]
    assert len(asked) == 15 * samples
    there = collections.Counter(
        _steps(
            torch.frombuffer(bytearray(prefix.with_suffix(".bin").read_bytes()), dtype=torch.uint16).long()
        )
    )
    twice = collections.Counter(pair for pair in asked if 255 not in pair) - there  # ends are shuffled
    assert not twice, "a step from one token to the next is asked for as often as it is there"


def _steps(tokens):
    return [tuple(pair) for pair in tokens.unfold(0, 2, 1).tolist()]


def test_the_task_and_the_documents_script_train_alike(folder, tmp_path):
    """One process by --task, two by --user-script; the saved model opens in Transformers."""
    from transformers import AutoModelForPreTraining, BertConfig, BertForPreTraining

    torch.manual_seed(0)
    BertForPreTraining(BertConfig.from_pretrained(folder / "bert")).save_pretrained(tmp_path / "bert")
    flags = [*flags_for(folder), "--pretrained-model-name-or-path", str(tmp_path / "bert")]
    train([*flags, "--save", str(tmp_path / "one")])
    rows = tiny.rows(tmp_path / "one" / "metrics.jsonl")
    losses = [row["loss"] for row in rows]
    assert sum(losses[-5:]) < sum(losses[:5]) - 1.0, "the run must learn, or losses say nothing"
    script = ["--user-script", str(SCRIPT), "--nproc-per-node", "2", "--json-log", str(tmp_path / "two")]
    done = tiny.run("train", *flags, *script)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert [row["loss"] for row in tiny.rows(tmp_path / "two")] == pytest.approx(losses, rel=1e-5)
    model = AutoModelForPreTraining.from_pretrained(tmp_path / "one" / "model")
    assert model.config.hidden_size == 32


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_words_and_pairs_count_each_by_their_own_number(folder, tmp_path, micro_batch):
    """Against the loss of the whole batch, which plain Transformers computes: two means, added."""
    from transformers import BertConfig, BertForPreTraining

    from megatron_npu.finetune.rapidformer import engine, state
    from megatron_npu.finetune.run import arguments, ranks

    torch.manual_seed(0)
    model = BertForPreTraining(BertConfig.from_pretrained(folder / "bert"))
    model.save_pretrained(tmp_path / "bert")
    where = ["--pretrained-model-name-or-path", str(tmp_path / "bert"), "--json-log", str(tmp_path / "log")]
    size = ["--micro-batch-size", str(micro_batch), "--train-iters", "2", "--lr-decay-style", "constant"]
    argv = [*flags_for(folder), *where, *size, "--weight-decay", "0", "--lr", "1e-3"]
    train(argv)
    rows = tiny.rows(tmp_path / "log")
    args = arguments.parse(argv)
    args = arguments.with_ranks(args, ranks.Ranks())
    state.set_args(args)
    engine.meet(MeetingFlags.of(args))
    try:
        numbers = {"short_seq_prob": args.short_seq_prob, "seed": args.seed}
        samples, _, _ = pairs(folder, args, train_valid_test_num_samples=[16, 16, 8], **numbers)
    finally:
        engine.leave()
        state.set_args(None)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3, weight_decay=0.0)
    for number, row in enumerate(rows):
        some = [samples[index] for index in range(8 * number, 8 * number + 8)]
        loss = model(**{name: torch.stack([one[name] for one in some]) for name in some[0]}).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert row["loss"] == pytest.approx(loss.item(), rel=2e-6)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_a_causal_model_learns_the_same_data(folder, tmp_path):
    train([*flags_for(folder, "gpt2"), "--json-log", str(tmp_path / "log")])
    losses = [row["loss"] for row in tiny.rows(tmp_path / "log")]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("model", ["bert", "gpt2"])
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_a_vocabulary_that_does_not_fit_is_said(folder, tmp_path, capsys, model, share):
    """Data whose tokens are mostly the one for unknown words, as a wrong vocabulary makes them."""
    sentences.write(tmp_path / "text")
    stream = tmp_path / "text.bin"
    tokens = np.fromfile(stream, np.uint16)
    tokens[np.random.default_rng(1).random(len(tokens)) < share] = 1
    tokens.tofile(stream)
    (tmp_path / "text.sums.json").unlink()
    vocabulary = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(folder / "vocab.txt")]
    if model == "gpt2":
        tiny_models.gpt2(tmp_path / "gpt")  # its tokenizer's id of unknown words is 1, too
        vocabulary = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / "gpt")]
    few = ["--train-iters", "1", "--eval-iters", "0", "--json-log", str(tmp_path / "log")]
    train([*flags_for(folder, model), *vocabulary, "--data-path", str(tmp_path / "text"), *few])
    told = "% of the tokens of the training data are unknown to the vocabulary of"
    assert (told in capsys.readouterr().err) is (share > 0)


def test_a_known_name_needs_no_file_and_flags_win_over_it(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "nothing"))
    sizes = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 64".split()
    named = ["--pretrained-model-name-or-path", "bert-base-uncased", *sizes]
    log = ["--json-log", str(tmp_path / "log"), "--train-iters", "1", "--eval-iters", "0"]
    train([*flags_for(folder), *named, *log])
    said = capsys.readouterr().out
    assert "using Transformers' default configuration of bert" in said
    assert "num_hidden_layers 1, hidden_size 16, num_attention_heads 2, max_position_embeddings 64" in said
    assert len(tiny.rows(tmp_path / "log")) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("--seq-length 65", "--seq-length must be at most 64, the number of positions of"),
        ("--hidden-size 30", "--hidden-size must be a multiple of --num-attention-heads 4, but got 30"),
        ("--tokenizer-type GPT2BPETokenizer", "a WordPiece tokenizer"),
        ("--model-of-fewer", "has embeddings for 84 tokens, but the vocabulary has 85"),
    ],
)
def test_what_does_not_fit_is_said(folder, changes, said, tmp_path):
    from transformers import BertConfig

    if changes == "--model-of-fewer":
        BertConfig.from_pretrained(folder / "bert", vocab_size=84).save_pretrained(tmp_path)
        changes = f"--pretrained-model-name-or-path {tmp_path}"
    with pytest.raises(UsageError, match=said):
        train([*flags_for(folder), *changes.split()])


def test_masks_and_positions_follow_the_documents_as_the_flags_say(monkeypatch):
    from megatron_npu.finetune import get_ltor_masks_and_position_ids

    tokens = torch.tensor([[5, 0, 6, 7, 0, 8]])  # 0 ends a document
    mask, loss, places = get_ltor_masks_and_position_ids(tokens, 0, False, False, False)
    assert (mask, loss.tolist(), places.tolist()) == (None, [[1.0] * 6], [list(range(6))])
    mask, loss, places = get_ltor_masks_and_position_ids(tokens, 0, True, True, True)
    assert loss.tolist() == [[1.0, 0.0, 1.0, 1.0, 0.0, 1.0]]
    assert places.tolist() == [[0, 1, 0, 1, 2, 0]]
    seen = [[0, 1], [0, 1], [2, 3, 4], [2, 3, 4], [2, 3, 4], [5]]
    expected = [[other not in own or other > row for other in range(6)] for row, own in enumerate(seen)]
    assert mask.tolist() == [[expected]]


def test_a_vocabulary_without_word_pieces_is_named(tmp_path):
    """With the right type of tokenizer, which the user need not be told to pass."""
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat\n")
    flags = PieceFlags("BertWordPieceLowerCase", vocab_file=str(vocabulary))
    with pytest.raises(UsageError, match=rf"--vocab-file {vocabulary} contains no word pieces that start"):
        word_pieces.word_pieces(flags)
