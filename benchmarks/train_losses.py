"""Losses of `megatron-npu train` with switches on, compared with those of Transformers' Trainer.

    python benchmarks/train_losses.py [--steps 100] [--seeds 6]

Both start from the same weights, with the same samples in the same order and the same hyperparameters, for a
tiny BERT (masked words) and GPT-2. The switches are --fused-ops and --graph-optimization, and in bf16
--mixed-precision, where the Trainer has bf16=True. Without dropout the losses of each step are compared. With
dropout, each side draws its own masks: for several seeds the last fifth of the losses is averaged, and the
mean of the differences is compared with its standard error. One process, one thread. Results go to
benchmarks/results/hf-losses-cpu.json.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forks import fork

MODELS, PRECISIONS = ("bert", "gpt2"), ("fp32", "bf16")
SIZES = {"vocabulary": 512, "hidden": 128, "layers": 2, "heads": 4, "length": 64}
SAMPLES, BATCH = 400, 8
RATE, WARMUP, DECAY, CLIP, DROPOUT = 1e-3, 10, 0.01, 1.0, 0.1
FIRST = 20  # steps of which an issue asks for 1e-5
SCRIPT = '''"""A user's template: its data set notes which samples are asked for."""

import os

import torch
from rapidformer import Finetuner, RapidformerEngine, get_args
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM


class Noted(torch.utils.data.Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        with open(os.environ["ORDER"], "a") as stream:
            print(number, file=stream)
        return self.samples[number]


class Mine(Finetuner):
    def train_valid_test_datasets_provider(self):
        return Noted(torch.load(os.environ["SAMPLES"])), None, None, torch.utils.data.default_collate

    def model_optimizer_lr_scheduler_provider(self):
        folder = get_args().pretrained_model_name_or_path
        kind = AutoModelForMaskedLM if folder.endswith("bert") else AutoModelForCausalLM
        return kind.from_pretrained(folder), None, None

    def run_forward_step(self, batch, model):
        return model(**batch).loss


Mine(RapidformerEngine()).train()
'''


def main() -> None:
    """Compare everything, print it, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--json", type=Path, help="write to this file instead of benchmarks/results/…")
    args = parser.parse_args()
    os.environ |= {"MEGATRON_NPU_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    _import_once()
    import report
    import torch
    import transformers

    torch.set_num_threads(1)
    rows = {}
    for model in args.models:
        for precision in args.precisions:
            rows[f"{model} {precision}"] = compare(model, precision, args.steps, args.seeds)
            settings = {"model": SIZES, "batch": BATCH, "steps": args.steps, "seeds": args.seeds}
            found = {"threads": 1, **settings, "first": FIRST, "dropout": DROPOUT, "rows": rows}
            path = args.json or report.RESULTS / "hf-losses-cpu.json"
            report.write(path, found, transformers=transformers.__version__)


def _import_once() -> None:
    """Import what all forks need."""
    import torch._dynamo  # noqa: F401
    import transformers.models.bert.modeling_bert
    import transformers.models.gpt2.modeling_gpt2
    import transformers.trainer  # noqa: F401


def compare(model: str, precision: str, steps: int, seeds: int) -> dict[str, Any]:
    """Return how far a model's losses differ, without and with dropout."""
    mine, theirs = pair(model, precision, steps, 0.0, 0)
    apart = [abs(one - other) / abs(other) for one, other in zip(mine, theirs, strict=True)]
    ends = [
        [statistics.fmean(side[-steps // 5 :]) for side in pair(model, precision, steps, DROPOUT, seed)]
        for seed in range(seeds)
    ]
    differences = [one - other for one, other in ends]
    found = {
        "ours": mine,
        "trainer": theirs,
        "apart_in_the_first": max(apart[:FIRST]),
        "apart": max(apart),
        "ends_with_dropout": ends,
        "difference": statistics.fmean(differences),
        "standard_error": statistics.stdev(differences) / math.sqrt(seeds),
    }
    print(
        f"{model} {precision}: from {mine[0]:.3f} to {mine[-1]:.3f}; apart {max(apart[:FIRST]):.1e} in the "
        f"first {FIRST}, {max(apart):.1e} in {steps} steps; with dropout {found['difference']:+.4f} +/- "
        f"{found['standard_error']:.4f} over {seeds} seeds",
        flush=True,
    )
    return found


def pair(model: str, precision: str, steps: int, dropout: float, seed: int) -> list[list[float]]:
    """Return the loss of each step, ours and the Trainer's, each from a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for side in (_ours, _trainers):  # ours draws the order of the samples
            start = functools.partial(_write, side, place, model, precision, steps, dropout, seed)
            fork(start, 1, f"{side.__name__} {model} {precision}")
        found = [json.loads((place / f"{side.__name__}.json").read_text()) for side in (_ours, _trainers)]
    if {len(side) for side in found} != {steps}:
        raise RuntimeError(f"{[len(side) for side in found]} losses instead of {steps}")
    return found


def _write(side: Any, place: Path, *rest: Any) -> None:
    rank = rest[-1]  # of ``fork``: there is one
    assert rank == 0
    (place / f"{side.__name__}.json").write_text(json.dumps(side(place, *rest[:-1])))


def _ours(place: Path, model: str, precision: str, steps: int, dropout: float, seed: int) -> list[float]:
    """Train with the command; leave model, samples and their order in ``place``."""
    import torch

    from megatron_npu.commands import cli

    _model(model, dropout).save_pretrained(place / model)
    torch.save(_samples(model), place / "samples.pt")
    (place / "script.py").write_text(SCRIPT)
    os.environ |= {"ORDER": str(place / "order"), "SAMPLES": str(place / "samples.pt")}
    switches = ["--fused-ops", "--graph-optimization", *["--mixed-precision"] * (precision == "bf16")]
    flags: list[Any] = [
        *("--user-script", place / "script.py", "--pretrained-model-name-or-path", place / model),
        *("--train-iters", steps, "--micro-batch-size", BATCH, "--seed", seed, "--lr", RATE),
        *("--lr-warmup-iters", WARMUP, "--weight-decay", DECAY, "--clip-grad", CLIP),
        *("--log-interval", 1, "--json-log", place / "log.jsonl", "--nproc-per-node", 1),
    ]
    with (place / "printed").open("w") as stream, contextlib.redirect_stdout(stream):
        code = cli.main(["train", *map(str, flags), *switches])
    if code:
        raise RuntimeError(f"exit code {code}: {(place / 'printed').read_text()[-2000:]}")
    rows = [json.loads(line) for line in (place / "log.jsonl").read_text().splitlines()]
    return [loss for row in rows if "losses" in row for loss in row["losses"]]


def _trainers(place: Path, model: str, precision: str, steps: int, dropout: float, seed: int) -> list[float]:
    """Train with Transformers' Trainer on the samples that our run has used."""
    import torch
    import transformers

    losses: list[float] = []

    class Trainer(transformers.Trainer):
        """Records the loss of each step; Trainer's logs round it."""

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    kind = transformers.AutoModelForMaskedLM if model == "bert" else transformers.AutoModelForCausalLM
    samples = torch.load(place / "samples.pt")
    order = [int(line) for line in (place / "order").read_text().split()][: steps * BATCH]
    options = transformers.TrainingArguments(
        output_dir=str(place / "trainer"),
        seed=seed,
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        learning_rate=RATE,
        warmup_steps=WARMUP,
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        optim="adamw_torch",
        bf16=precision == "bf16",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    with (place / "printed").open("w") as stream, contextlib.redirect_stdout(stream):
        trained = kind.from_pretrained(place / model)
        Trainer(trained, options, train_dataset=[samples[number] for number in order]).train()
    return losses


def _model(model: str, dropout: float) -> Any:
    """Return the model with the weights from which both sides start."""
    import torch
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    if model == "bert":
        sizes = {"vocab_size": SIZES["vocabulary"], "max_position_embeddings": SIZES["length"]}
        sizes |= {"hidden_size": SIZES["hidden"], "intermediate_size": 4 * SIZES["hidden"]}
        sizes |= {"num_hidden_layers": SIZES["layers"], "num_attention_heads": SIZES["heads"]}
        parts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        return BertForMaskedLM(BertConfig(**sizes, **parts))
    sizes = {"vocab_size": SIZES["vocabulary"], "n_positions": SIZES["length"], "n_embd": SIZES["hidden"]}
    sizes |= {"n_layer": SIZES["layers"], "n_head": SIZES["heads"]}
    parts = {f"{part}_pdrop": dropout for part in ("resid", "embd", "attn")}
    return GPT2LMHeadModel(GPT2Config(**sizes, **parts, bos_token_id=None, eos_token_id=None))


def _samples(model: str) -> list[dict[str, Any]]:
    """Return sequences that can be learned: four of five tokens follow from the previous one."""
    import torch

    draw = torch.Generator().manual_seed(1)
    follows = torch.randperm(SIZES["vocabulary"], generator=draw)
    ids = torch.randint(SIZES["vocabulary"], (SAMPLES, SIZES["length"]), generator=draw)
    for place in range(1, SIZES["length"]):
        kept = torch.rand(SAMPLES, generator=draw) < 0.8
        ids[:, place] = torch.where(kept, follows[ids[:, place - 1]], ids[:, place])
    asked = torch.rand(ids.shape, generator=draw) < 0.15
    # the Trainer divides by the number of labels, and would count the first one, which nothing predicts
    labels = ids.masked_fill(~asked if model == "bert" else torch.arange(SIZES["length"]) == 0, -100)
    seen = ids.masked_fill(asked, 0) if model == "bert" else ids
    mask = torch.ones_like(ids[0])
    return [
        {"input_ids": one, "attention_mask": mask, "labels": answer}
        for one, answer in zip(seen, labels, strict=True)
    ]


if __name__ == "__main__":
    main()
