"""Several trainings in one script, trainings that cannot go on, and templates that say what counts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data import loading
from megatron_npu.finetune.model import pair_losses, precision
from megatron_npu.finetune.rapidformer.templates import Finetuner, PreTrainer
from megatron_npu.finetune.run import label_shares, loop, ranks
from tests.finetune import tasks_data
from tests.support import train_runs

SCRIPTS = Path(__file__).parent / "scripts"
CPU = torch.device("cpu")


def test_each_training_of_a_script_has_its_own_length() -> None:
    flags = ["--micro-batch-size", "4", "--epochs", "3", "--min-lr", "0", "--lr", "0.1"]
    done = train_runs.train("--user-script", SCRIPTS / "two_trainings.py", *flags)
    assert done.returncode == 0, done.stderr
    for samples, iterations in ((8, 6), (24, 18)):
        assert f"{samples} samples: {iterations} iterations, {iterations} losses, rate 0\n" in done.stdout
    assert done.stdout.count("8 samples: 6 iterations") == 2
    assert "flags as before: True" in done.stdout


def test_fp16_that_overflows_for_ever_ends_the_run(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    argv = tasks_data.write(tmp_path, "sequence_classification")
    flags = ["--mixed-precision", "fp16", "--lr", "1e6", "--clip-grad", "0", "--epochs", "1000"]
    done = train_runs.train(*argv, *flags, "--save", tmp_path / "save", HF_HOME=str(tmp_path / "hub"))
    assert done.returncode == 1, done.stdout[-2000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("megatron-npu train: ")]
    assert "overflows fp16 at iteration" in line
    assert "with the smallest loss scale, 1; nothing was saved after this iteration." in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "save" / "model").exists()
    rows = [json.loads(row) for row in (tmp_path / "save" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["event"] == "end"


def test_the_loss_scale_has_a_smallest_value() -> None:
    scale = precision.LossScale(value=4.0)
    values = []
    for _ in range(4):
        assert scale.update(float("inf"))
        values.append(scale.value)
    assert values == [2.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["megatron_npu", "other"])
def test_the_line_of_a_script_is_named_wherever_it_is(name: str, tmp_path: Path) -> None:
    script = tmp_path / name / "mine.py"
    script.parent.mkdir()
    script.write_text("import torch\n\ndef fails():\n    torch.ones(2) @ torch.ones(3)\n\nfails()\n")
    done = train_runs.train("--user-script", script, "--train-iters", 1)
    assert done.returncode == 2
    assert "mine.py failed with RuntimeError: " in done.stderr
    assert "(mine.py, line 4, in fails)" in done.stderr
    assert "Traceback" not in done.stderr


# -- what counts


class Words(nn.Module):
    """Logits of two words for each place, all from one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -0.25]))

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return places[..., None] * self.weight


LABELS = torch.tensor([[1, 0, 1, 1], [0, -100, -100, -100], [-100] * 4, [1, 1, -100, -100]])
ROWS = [{"places": torch.arange(4.0) + row, "labels": labels} for row, labels in enumerate(LABELS)]


def mean_of(rows: list[dict[str, torch.Tensor]], model: nn.Module) -> torch.Tensor:
    """Return the mean over the labels of rows, one by one."""
    every = [
        -model(row["places"]).log_softmax(-1)[place, label]
        for row in rows
        for place, label in enumerate(row["labels"].tolist())
        if label != -100
    ]
    return torch.stack(every).mean()


class Template:
    """What both templates below share."""

    model: Any = None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        self.model = Words()
        return self.model, torch.optim.SGD(self.model.parameters(), lr=0.1), None

    def loss(self, batch: Any, model: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["places"]).flatten(0, 1), batch["labels"].flatten())


class Fine(Template, Finetuner):
    def train_valid_test_datasets_provider(self) -> Any:
        return ROWS, ROWS[:3], None, None

    def run_forward_step(self, batch: Any, model: nn.Module) -> Any:
        return self.loss(batch, model)


class Pre(Template, PreTrainer):
    def train_valid_test_datasets_provider(self, samples: Any) -> Any:
        return ROWS, ROWS[:3], None

    def run_forward_step(self, data_iterator: Any, model: nn.Module) -> Any:
        return self.loss(next(data_iterator), model)


class Twice(Pre):
    """Takes two batches for a loss."""

    def run_forward_step(self, data_iterator: Any, model: nn.Module) -> Any:
        both = [next(data_iterator), next(data_iterator)]
        return self.loss({name: torch.cat([one[name] for one in both]) for name in both[0]}, model)


class Uneven(Pre):
    """Takes one batch, then two."""

    taken = 0

    def run_forward_step(self, data_iterator: Any, model: nn.Module) -> Any:
        self.taken += 1
        for _ in range(self.taken):
            batch = next(data_iterator)
        return self.loss(batch, model)


class Alike(Pre):
    """Says that every micro-batch counts as much."""

    def label_counts(self, batch: Any) -> int:
        return 1


class Parts(Fine):
    """Has two losses, each with labels of its own: the words, and one a row."""

    def label_counts(self, batch: Any) -> tuple[int, ...]:
        return int((batch["labels"] != -100).sum()), len(batch["labels"])

    def run_forward_step(self, batch: Any, model: nn.Module) -> Any:
        return self.loss(batch, model), model(batch["places"]).square().mean()


def trained(kind: Any, *flags: str, micro_batch: int = 1) -> Any:
    """Train a template in this process for an iteration; return its outcome."""
    from megatron_npu.finetune.rapidformer import engine, state

    size = ["--micro-batch-size", str(micro_batch), "--global-batch-size", "4", "--train-iters", "1"]
    common = ["--user-script", __file__, "--clip-grad", "0", "--eval-iters", "1", "--no-plot"]
    args = tasks_data.parsed([*common, *size, *flags])
    try:
        return kind(engine=engine.RapidformerEngine(args)).train()
    finally:
        engine.leave()
        state.set_args(None)


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")


def plain(rows: list[dict[str, torch.Tensor]] = ROWS) -> tuple[float, float]:
    """Return the loss of rows, and the norm of its gradient."""
    model = Words()
    loss = mean_of(rows, model)
    loss.backward()
    return loss.item(), float(model.weight.grad.norm())


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("kind", [Fine, Pre])
def test_a_template_of_ones_own(kind: Any, micro_batch: int) -> None:
    outcome = trained(kind, micro_batch=micro_batch)
    loss, norm = plain()
    assert outcome.losses == [pytest.approx(loss, rel=1e-6)]
    assert outcome.grad_norms == [pytest.approx(norm, rel=1e-6)]
    model = Words()
    step = mean_of(ROWS, model)
    step.backward()
    with torch.no_grad():
        model.weight -= 0.1 * model.weight.grad
        # a pre-training evaluates four batches of one of three samples: the first one twice
        seen = [*ROWS[:3], ROWS[0]] if kind is Pre and micro_batch == 1 else ROWS[:3]
        expected = float(mean_of(seen, model))
    assert outcome.evaluations[1].loss == pytest.approx(expected, rel=1e-6)


def test_a_loss_of_several_batches() -> None:
    loss, norm = plain([*ROWS, *ROWS])
    outcome = trained(Twice)
    assert (outcome.losses[0], outcome.grad_norms[0]) == pytest.approx((loss, norm), rel=1e-6)


def test_another_number_of_batches_for_each_loss_is_refused() -> None:
    with pytest.raises(UsageError, match="but it used 1 for one loss and 2 for the next"):
        trained(Uneven)


def test_a_template_says_that_micro_batches_count_alike() -> None:
    mean = sum(plain([ROWS[0], ROWS[1]])[:1] + plain(ROWS[2:])[:1]) / 2
    assert trained(Alike, micro_batch=2).losses == [pytest.approx(mean, rel=1e-6)]


def test_two_losses_count_by_labels_of_their_own() -> None:
    model = Words()
    squares = torch.stack([model(row["places"]).square().mean() for row in ROWS]).mean()
    expected = (mean_of(ROWS, model) + squares).item()
    for micro_batch in (1, 2, 4):
        assert trained(Parts, micro_batch=micro_batch).losses == [pytest.approx(expected, rel=1e-6)]


def test_one_label_a_row_is_divided_by_the_number_of_micro_batches() -> None:
    """To the bit: what tasks with a label for each row have been is what they are."""
    held = (label_shares.Held({"labels": torch.zeros(2, dtype=torch.long)}) for _ in range(99))
    batches = label_shares.MicroBatches(held, label_shares.labels_in, move=lambda batch: batch, ranks=1)
    batches.begin(3)
    for _ in range(3):
        next(batches)
        assert batches.divisors() == [3.0]


@pytest.mark.parametrize(
    ("batch", "shifted", "labels"),
    [
        ({"labels": torch.tensor([[1, -100, 3]])}, False, 2),
        ({"labels": torch.tensor([[1, -100, 3]])}, True, 1),
        ({"labels": torch.tensor([1, -100])}, True, 1),
        ({"labels": torch.tensor([0.5, 1.5, 2.5])}, False, 3),
        ({"input_ids": torch.zeros(4, 7)}, False, 4),
        ((torch.zeros(5, 2), torch.zeros(5)), False, 5),
        ({"text": ["a", "b"]}, False, 1),
        (None, False, 1),
    ],
)
def test_what_a_batch_counts(batch: Any, shifted: bool, labels: int) -> None:
    assert label_shares.labels_in(batch, shifted=shifted) == labels


def test_models_that_shift_their_labels_are_known() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 9, "n_positions": 8}
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(**small))
    assert label_shares.shifts_labels(gpt)
    assert label_shares.shifts_labels(type("FSDPGPT2LMHeadModel", (type(gpt),), {})(gpt.config))
    t5 = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
    assert not label_shares.shifts_labels(
        transformers.T5ForConditionalGeneration(transformers.T5Config(**t5))
    )
    bart = {"d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "vocab_size": 9}
    sizes = {"decoder_ffn_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    assert not label_shares.shifts_labels(
        transformers.BartForCausalLM(transformers.BartConfig(**bart, **sizes))
    )
    assert not label_shares.shifts_labels(nn.Linear(1, 1))


@pytest.mark.parametrize("samples", [7, 8, 9, 10, 11])
def test_an_evaluation_has_each_sample_once_on_any_number_of_ranks(samples: int) -> None:
    for world_size in (1, 2, 3, 4):
        seen = []
        for rank in range(world_size):
            place = ranks.Ranks(rank=rank, world_size=world_size)
            loader = loading.Loader(list(range(samples)), sampling=loading.Sampling(2, place), device=CPU)
            every = list(loader.held(0, once=True))
            assert len(every) == len(loader)
            seen += [number for held in every if held.counts for number in held.batch.tolist()]
        assert sorted(seen) == list(range(samples))


def test_the_mean_of_an_evaluation_is_over_labels() -> None:
    engine = SimpleNamespace(device=CPU, args=SimpleNamespace(world_size=1), pairs=None, shifts_labels=False)
    template, model = Fine(engine), Words()  # type: ignore[arg-type]
    loader = loading.Loader(ROWS, sampling=loading.Sampling(1, ranks.Ranks()), device=CPU)
    found = loop.mean_loss(
        template, lambda batches: template.run_forward_step(next(batches), model), loader.held(0), 4
    )
    assert found == pytest.approx(mean_of(ROWS, model).item(), rel=1e-6)


def test_a_loss_of_words_and_pairs_is_parted_where_it_can_be() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = transformers.BertForPreTraining(transformers.BertConfig(vocab_size=9, **small)).eval()
    assert pair_losses.has_pairs(model)
    assert not pair_losses.has_pairs(nn.Linear(1, 1))
    parts = pair_losses.PairLoss(model)
    batch = {"input_ids": torch.arange(8).view(2, 4), "next_sentence_label": torch.tensor([0, 1])}
    labels = torch.tensor([[1, -100, 2, 3], [-100] * 4])
    loss = model(**batch, labels=labels).loss
    words, of_pairs = parts.split(loss)
    outputs = model(input_ids=batch["input_ids"])
    expected = nn.functional.cross_entropy(outputs.prediction_logits.flatten(0, 1), labels.flatten())
    assert words.item() == pytest.approx(expected.item(), rel=1e-5)
    assert (words + of_pairs).item() == pytest.approx(loss.item(), rel=1e-6)
    loss = model(**batch, labels=labels, return_dict=False)[0]
    assert [part.item() for part in parts.split(loss)] == [loss.item(), 0.0]
