"""Experts are balanced over the tokens of the whole global batch, in micro-batches and on ranks alike.

The judge is a loop in plain Transformers that takes each global batch whole, with the model's own loss.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")

from megatron_npu.finetune.run import expert_balance  # noqa: E402
from tests.finetune import tasks_data  # noqa: E402
from tests.support import tiny, tiny_models  # noqa: E402

ITERATIONS, LR, LENGTH, BLOCKS = 3, 3e-3, 16, 8
COEFFICIENT = 0.5


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words enough for eight blocks, and a mixture whose router has an opinion."""
    folder = tmp_path_factory.mktemp("balance")
    words = [word for word in tiny_models.WORDS if word.isalpha()]
    text = " ".join(words[(7 * n * n + 3 * n) % 23] for n in range(LENGTH * BLOCKS))
    for part in ("train", "validation"):
        tasks_data.write_rows(folder / "text" / f"{part}.jsonl", [{"text": text}])
    changes = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT, "initializer_range": 0.5}
    tiny_models.mixtral(folder / "mixtral", **changes)
    return folder


def command(place: Path, micro_batch: int, *flags: str) -> list[str]:
    return [
        *("--task", "causal_lm", "--data-path", str(place / "text"), "--seq-length", str(LENGTH)),
        *("--pretrained-model-name-or-path", str(place / "mixtral"), "--global-batch-size", str(BLOCKS)),
        *("--micro-batch-size", str(micro_batch), "--epochs", str(ITERATIONS), "--lr", str(LR)),
        *("--weight-decay", "0", "--log-interval", "1", "--eval-interval", "99", "--no-plot", *flags),
    ]


@pytest.fixture(scope="module")
def whole(place: Path) -> tuple[list[float], list[float]]:
    """Losses and norms of the loop."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "mixtral")
    row = json.loads((place / "text" / "train.jsonl").read_text())
    tokens = torch.tensor(tokenizer(row["text"])["input_ids"]).view(BLOCKS, LENGTH)
    model = transformers.MixtralForCausalLM.from_pretrained(place / "mixtral").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 - at / ITERATIONS)
    losses, norms = [], []
    for _ in range(ITERATIONS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_one_rank(micro_batch: int, place: Path, whole: Any) -> None:
    _, outcome = tasks_data.train(command(place, micro_batch))
    assert outcome.losses == pytest.approx(whole[0], rel=2e-6)
    assert outcome.grad_norms == pytest.approx(whole[1], rel=2e-5)


def test_the_model_s_own_function_is_there_again_after_a_run(place: Path) -> None:
    from transformers.models.mixtral import modeling_mixtral

    before = modeling_mixtral.load_balancing_loss_func
    tasks_data.train(command(place, 4, "--train-iters", "1"))
    assert modeling_mixtral.load_balancing_loss_func is before


def test_two_ranks(place: Path, whole: Any, tmp_path: Path) -> None:
    """One micro-batch on each rank, and several; weights whole and shared out."""
    runs: dict[str, tuple[int, list[str]]] = {
        "one": (4, []),
        "several": (1, []),
        "shared": (2, ["--fsdp-memory-optimization"]),
        "recomputed": (2, ["--zero-1-memory-optimization", "--checkpoint-activations"]),
    }
    commands = {
        name: command(place, size, *flags, "--json-log", str(tmp_path / name))
        for name, (size, flags) in runs.items()
    }
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    result = tiny.run_python(
        [
            *(tiny.sys.executable, *tiny.torchrun(2)),
            *("-m", "tests.finetune.tasks_worker", str(tmp_path / "commands.json"), str(tmp_path)),
        ],
        {**tiny.environment(), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
    )
    assert result.returncode == 0, result.stderr
    for name in commands:
        rows = tiny.rows(tmp_path / name)
        assert [one for row in rows for one in row["losses"]] == pytest.approx(whole[0], rel=2e-6), name
        assert [one for row in rows for one in row["grad_norms"]] == pytest.approx(whole[1], rel=2e-5), name


def test_dropout_is_the_same_when_choices_are_counted(place: Path) -> None:
    """With dropout a run of two micro-batches is one, and generators go on as without the balance."""
    model = tiny_models.mixtral(
        place / "dropping", output_router_logits=True, router_aux_loss_coef=COEFFICIENT, attention_dropout=0.5
    )
    flags = ["--pretrained-model-name-or-path", str(model)]
    found = [tasks_data.train([*command(place, 4), *flags])[1].losses for _ in range(2)]
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "router_aux_loss_coef": 0.0}))
    _, counted = tasks_data.train([*command(place, 4), *flags])
    config.write_text(json.dumps({**json.loads(config.read_text()), "output_router_logits": False}))
    _, plain = tasks_data.train([*command(place, 4), *flags])
    assert found[0] == found[1] != plain.losses
    assert counted.losses == pytest.approx(plain.losses, rel=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_the_sums_are_those_of_transformers(masked: bool) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    draw = torch.Generator().manual_seed(1)
    layers = tuple(torch.randn(12, 4, generator=draw) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]]) if masked else None
    sums = expert_balance.sums_of(layers, 4, 2, mask)
    found = 4 * (sums.chosen * sums.probabilities).sum() / sums.tokens**2
    assert float(found) == pytest.approx(float(load_balancing_loss_func(layers, 4, 2, mask)), rel=1e-6)


def test_which_models_have_it() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.MixtralConfig(vocab_size=8, **sizes, num_key_value_heads=2, num_local_experts=2)
    assert expert_balance.of(transformers.MixtralForCausalLM(config), 1) is None
    config.output_router_logits = True
    assert expert_balance.of(transformers.MixtralForCausalLM(config), 1) is not None
    plain = transformers.LlamaConfig(vocab_size=8, **sizes)
    assert expert_balance.of(transformers.LlamaForCausalLM(plain), 1) is None
    assert expert_balance.of(torch.nn.Linear(2, 2), 1) is None
