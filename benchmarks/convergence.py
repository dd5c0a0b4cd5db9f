"""Whether a switch changes what a model learns: loss and accuracy at the end, with it and without.

    python benchmarks/convergence.py [--steps 80] [--seeds 3] [--only zero-1 ...]

Two ranks fine-tune a small BERT of Transformers on pairs of made-up sentences until the loss has clearly
fallen, by the function that `megatron-npu train` and `engine.compose` accelerate a model with. One label of
twenty is wrong, so that nobody reaches all of them. Each seed gives weights, data and order; a row is
compared with the one without switches of the same seed; what another seed changes stands beside it. Results
go to benchmarks/results/convergence-cpu.json, with the commit; scripts/convergence_page.py makes
docs/records/convergence.md of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.forks import fork  # noqa: E402

RANKS, BATCH, RATE = 2, 16, 2e-3
WRONG = 0.05  # part of the labels that are not what the words say
VALIDATED = 500  # pairs that nobody trains on
WORDS = ("good", "bad", "plain")  # kinds of words, twenty each
SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
# the document's switches, then what its command lines put together
ROWS: dict[str, dict[str, Any]] = {
    "none": {},
    "mixed bf16": {"mixed_precision": "bf16"},
    "mixed fp16": {"mixed_precision": "fp16"},
    "zero-1": {"sharding": "zero-1"},
    "zero-2": {"sharding": "zero-2"},
    "zero-3": {"sharding": "zero-3"},
    "fsdp": {"sharding": "fsdp"},
    "checkpoint-activations": {"checkpoint_activations": True},
    "fused-ops": {"fused_ops": True},
    "mixed + zero-1": {"mixed_precision": "bf16", "sharding": "zero-1"},
    "mixed + zero-3": {"mixed_precision": "bf16", "sharding": "zero-3"},
    "graph": {"graph_optimization": True},
    "mixed + graph + zero-1": {
        "mixed_precision": "bf16",
        "graph_optimization": True,
        "sharding": "zero-1",
    },
}


def main(argv: Sequence[str] | None = None) -> None:
    """Train everything; the JSON is written after each row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--json", type=Path, help="a file instead of benchmarks/results/convergence-cpu.json")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    os.environ |= {"MEGATRON_NPU_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    import transformers.models.bert.modeling_bert  # noqa: F401

    import megatron_npu.finetune.model.prepare  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        fork(lambda rank: be_a_rank(args, rank, Path(folder)), RANKS, "a rank")


def be_a_rank(args: argparse.Namespace, rank: int, folder: Path) -> None:
    """Train every row with every seed; rank 0 writes what comes of it."""
    import torch
    import torch.distributed as dist

    from benchmarks import report

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    rows: dict[str, list[dict[str, float]]] = {}
    known = {"threads": 1, "ranks": RANKS, "steps": args.steps, "seeds": args.seeds, "commit": commit()}
    for name in args.only:
        torch.compiler.reset()
        rows[name] = [trained(ROWS[name], args.steps, seed, rank) for seed in range(args.seeds)]
        if rank == 0:
            print(f"{name}: {json.dumps(rows[name])}", flush=True)
            path = args.json or report.RESULTS / "convergence-cpu.json"
            report.write(path, {**known, "batch": BATCH * RANKS, "model": SIZE, "rows": rows})
    dist.destroy_process_group()


def commit() -> str:
    """Return the last commit that changed the package, in short."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "megatron_npu"]
    return subprocess.run(command, timeout=60, capture_output=True, text=True, check=True).stdout.strip()


def trained(words: dict[str, Any], steps: int, seed: int, rank: int) -> dict[str, float]:
    """Return the means of the first and of the last losses, and loss and accuracy on other pairs."""
    import torch
    import transformers

    from megatron_npu.finetune.model.prepare import AdamOptions, prepare
    from megatron_npu.options.switches import Switches

    torch.manual_seed(seed)
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(
        vocab_size=5 + 20 * len(WORDS), max_position_embeddings=32, num_labels=2, **SIZE, **no_dropout
    )
    model = transformers.BertForSequenceClassification(config).train()
    prepared = prepare(
        model,
        None,
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps)),
        Switches(**words),
        device=torch.device("cpu"),
        clip_grad=1.0,
        adam=AdamOptions(lr=RATE),
    )
    drawn, losses = random.Random(seed), []
    for _ in range(steps):
        pairs = [_pair(drawn) for _ in range(RANKS * BATCH)]
        with prepared.accumulating(last=True):
            with prepared.forward_context():
                loss = prepared.model(**_batch(pairs[rank::RANKS])).loss
            prepared.backward(loss)
        prepared.step()
        losses.append(_mean(loss.detach()))
    some = max(1, steps // 10)
    unseen = _validated(prepared, [_pair(drawn) for _ in range(VALIDATED)][rank::RANKS])
    return {"first": sum(losses[:some]) / some, "last": sum(losses[-some:]) / some, **unseen}


def _validated(prepared: Any, pairs: list[dict[str, Any]]) -> dict[str, float]:
    import torch

    prepared.model.eval()
    batch = _batch(pairs)
    with torch.no_grad(), prepared.forward_context():
        found = prepared.model(**batch)
    right = (found.logits.argmax(-1) == batch["labels"]).float().mean()
    return {"validation": _mean(found.loss), "accuracy": _mean(right)}


def _mean(value: Any) -> float:
    """Return the mean over the ranks of a number, ``[]``."""
    import torch.distributed as dist

    value = value.float().clone()
    dist.all_reduce(value)
    return float(value) / RANKS


def _rate(step: int, steps: int) -> float:
    warm = max(1, steps // 10)
    return min(1.0, (step + 1) / warm) * min(1.0, (steps - step) / (steps - warm))


def _pair(drawn: random.Random) -> dict[str, Any]:
    """Return two sentences, and whether more of their words are good than bad, which is not always told."""
    opinions = [drawn.choice(WORDS[:2]) for _ in range(5)]
    kinds = [*opinions, *["plain"] * 7]
    drawn.shuffle(kinds)
    tokens = [5 + 20 * WORDS.index(kind) + drawn.randrange(20) for kind in kinds]
    label = int(opinions.count("good") > opinions.count("bad"))
    return {"tokens": tokens, "label": 1 - label if drawn.random() < WRONG else label}


def _batch(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return [CLS] six words [SEP] six words [SEP] of each pair, ``[b, 15]``, and its label, ``[b]``."""
    import torch

    rows = [[2, *pair["tokens"][:6], 3, *pair["tokens"][6:], 3] for pair in pairs]
    kinds = [[0] * 8 + [1] * 7] * len(rows)
    return {
        "input_ids": torch.tensor(rows),
        "token_type_ids": torch.tensor(kinds),
        "labels": torch.tensor([pair["label"] for pair in pairs]),
    }


if __name__ == "__main__":
    main()
