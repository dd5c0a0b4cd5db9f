"""Record losses, resumes and layouts of Megatron-LM's main, against 0.19.2, Transformers and itself.

    python benchmarks/main_numbers.py [--part NAME ...] [--device cpu npu] [--again]

Each part is written to ``results/main/numbers.json`` with date and commit; parts that are in the file already
are skipped (``--again``: measured again). ``scripts/main_numbers_page.py`` makes the page. ``npu`` is a
simulated one.

- ``transformers``: six Adam steps from one Hugging Face checkpoint in fp32, by main, by 0.19.2, and by
  Transformers with torch's Adam on the batches that main's model got.
- ``layouts``: two processes against one, with the layouts of ``equal_numbers.py``.
- ``resume``: the tensors of an interrupted run's checkpoint against those of an uninterrupted run's.
- ``scripts: ...``, ``parallel: ...``, ``hybrid and gpt``, ``sharded: ...``, ``muon``: main's own scripts
  (``main_scripts.py``).
- ``check``: the last line of ``megatron-npu check``, and a run with ``MEGATRON_NPU_DRIFT=warn``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import equal_numbers as equal  # noqa: E402
import main_scripts  # noqa: E402
from main_runs import BEFORE, MAIN, TREE, Row, deviation, differing  # noqa: E402
from main_runs import run as _run  # noqa: E402

from megatron_npu.base import files  # noqa: E402
from tests.support import tiny  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "main" / "numbers.json"
LAYOUTS = ("TP 2", "TP 2, sequence parallel", "PP 2", "DP 2, distributed optimizer", "CP 2", "EP 2")
STEPS = 6
ADAM = (
    "--lr 1e-3 --lr-decay-style constant --weight-decay 0 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.999"
)
TRAINING = [
    *f"--micro-batch-size 2 --global-batch-size 4 --train-iters {STEPS} --eval-iters 0 --no-plot".split(),
    *"--attention-dropout 0 --hidden-dropout 0 --finetune --log-interval 1".split(),
    *ADAM.split(),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", nargs="+", choices=["cpu", "npu"], default=["cpu", "npu"])
    parser.add_argument("--again", action="store_true", help="measure again what the file already contains")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return _worker(*options.worker)
    for part in options.part:
        for device in options.device if part in ON_DEVICES else ["cpu"]:
            noted = any((row["part"], row["device"]) == (part, device) for row in _rows())
            if noted and not options.again:
                continue
            with tempfile.TemporaryDirectory() as folder:
                rows = [
                    _stamped({"part": part, "device": device, **row})
                    for row in PARTS[part](device, Path(folder))
                ]
            kept = [row for row in _rows() if (row["part"], row["device"]) != (part, device)]
            RESULTS.parent.mkdir(parents=True, exist_ok=True)
            files.write(RESULTS, json.dumps({"rows": kept + rows}, indent=1) + "\n")
            for row in rows:
                print(row["part"], row["device"], row["what"], row["found"], flush=True)
    return 0


def _rows() -> list[Row]:
    return json.loads(RESULTS.read_text())["rows"] if RESULTS.is_file() else []


def _stamped(row: Row) -> Row:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False, timeout=60).stdout.strip()
    return {**row, "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "commit": commit}


def _driver(*flags: str) -> list[str]:
    return ["-m", "megatron_npu", "pretrain", *flags]


# -- main, 0.19.2 and Transformers -------------------------------------------------------------------


def transformers(device: str, folder: Path) -> Iterator[Row]:
    """Train one GPT-2 and one Llama from Hugging Face weights by all three."""
    data = tiny.write_dataset(folder / "numbers")
    for name in ("gpt2", "llama"):
        source, start = folder / f"{name}-hf", folder / f"{name}-start"
        _make_hf(name, source)
        words = ["-m", "megatron_npu", "convert", "--from", "hf", "--to", "megatron"]
        _run(BEFORE, "cpu", [*words, "--tokenizer-type", "NullTokenizer", str(source), str(start)])
        losses: dict[str, list[float]] = {}
        for version in (BEFORE, MAIN):
            batches = folder / f"{name}-{version}.pt"
            log = folder / f"{name}-{version}.jsonl"
            flags = [*_shape(start), *TRAINING, "--data-path", str(data), "--split", "90,10,0"]
            flags += ["--load", str(start), "--json-log", str(log)]
            job = folder / "job.json"
            job.write_text(json.dumps({"flags": flags, "batches": str(batches)}))
            _run(version, device, [str(Path(__file__).resolve()), "--worker", "train", str(job)])
            losses[version] = [row["loss"] for row in tiny.rows(log)]
        job.write_text(json.dumps({"source": str(source), "batches": str(folder / f"{name}-{MAIN}.pt")}))
        said = _run(MAIN, "cpu", [str(Path(__file__).resolve()), "--worker", "plain", str(job)])
        losses["Transformers"] = json.loads(said.splitlines()[-1])
        for other in (BEFORE, "Transformers"):
            yield {
                "what": f"{name}, main against {other}",
                "found": deviation(losses[MAIN], losses[other]),
                "losses": losses[MAIN],
            }


def _shape(start: Path) -> list[str]:
    """Return the flags of the model that a checkpoint's description names."""
    (described,) = start.rglob("arguments.json")
    args = json.loads(described.read_text())
    args = args.get("arguments", args)
    words: list[str] = []
    for name in _VALUES:
        if args.get(name) is not None:
            words += [f"--{name.replace('_', '-')}", str(args[name])]
    words += [flag for name, (value, flag) in _SWITCHES.items() if args.get(name) == value]
    return words


_VALUES = (
    "num_layers hidden_size num_attention_heads seq_length max_position_embeddings ffn_hidden_size "
    "position_embedding_type normalization num_query_groups rotary_base layernorm_epsilon tokenizer_type "
    "vocab_size make_vocab_size_divisible_by"
).split()
_SWITCHES = {
    "swiglu": (True, "--swiglu"),
    "add_bias_linear": (False, "--disable-bias-linear"),
    "untie_embeddings_and_output_weights": (True, "--untie-embeddings-and-output-weights"),
    "group_query_attention": (True, "--group-query-attention"),
}


def _make_hf(name: str, folder: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    model: Any
    if name == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 256}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout))
    else:
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
        more = {"intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 32}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **more))
    model.save_pretrained(folder)


def _worker(kind: str, job: str) -> int:
    given = json.loads(Path(job).read_text())
    return {"train": _train, "plain": _plain, "differ": _differ}[kind](given)


def _train(given: Row) -> int:
    """Train with the driver in this process, and keep the batches that the model was given."""
    import torch

    from megatron_npu import plugin
    from megatron_npu.pretrain.flags import arguments
    from megatron_npu.pretrain.run import pretrain

    plugin.install()
    from megatron.core.models.gpt.gpt_model import GPTModel

    seen: list[Any] = []
    original = GPTModel.forward

    def forward(self: Any, tokens: Any, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        seen.append((tokens.cpu(), labels.cpu()))
        return original(self, tokens, *args, labels=labels, **kwargs)

    GPTModel.forward = forward
    pretrain.train(arguments.parse(given["flags"]))
    torch.save(seen, given["batches"])
    return 0


def _plain(given: Row) -> int:
    """Train with Transformers and torch's Adam on those batches; print the losses."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(given["source"], dtype=torch.float32).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    batches = torch.load(given["batches"], weights_only=True)
    losses = []
    for first in range(0, len(batches), 2):
        optimizer.zero_grad()
        parts = []
        for tokens, labels in batches[first : first + 2]:
            logits = model(tokens).logits.float()
            parts.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
            (parts[-1] / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(sum(part.item() for part in parts) / 2)
    print(json.dumps(losses))
    return 0


# -- main against itself -------------------------------------------------------------------------------


def layouts(device: str, folder: Path) -> Iterator[Row]:
    """Train in two processes and in one, from one checkpoint, in fp32."""
    group = equal.Group(MAIN, device, "fp32")
    against = {equal.LAYOUTS[name].against for name in LAYOUTS}
    names = [name for name in equal.LAYOUTS if name in against.union(LAYOUTS)]
    curves = equal._driver(group, names, folder)
    for name in LAYOUTS:
        curve, alone = curves[name], curves[equal.LAYOUTS[name].against]
        if curve.refused or len(curve.losses) != equal.STEPS:
            yield {"what": name, "found": curve.refused or "failed"}
            continue
        norm = deviation(curve.norms, alone.norms)
        yield {"what": name, "found": deviation(curve.losses, alone.losses), "norm": norm}


def resume(device: str, folder: Path) -> Iterator[Row]:
    """Train six iterations at once, and three and three."""
    data = tiny.write_dataset(folder / "numbers")
    flags = [*tiny.flags_for(data), "--eval-iters", "0"]
    whole, parts = (
        ["--save", str(folder / name), "--load", str(folder / name)] for name in ("whole", "parts")
    )
    for words in (whole, [*parts, "--exit-interval", "3"], parts):
        _run(MAIN, device, _driver(*flags, *words))
    one, other = (folder / name / "iter_0000006" for name in ("whole", "parts"))
    total, differ = differing(one, other, folder)
    yield {"what": f"tensors of {total} that differ after an interruption", "found": differ}


def _differ(given: Row) -> int:
    one, other = (Path(folder) for folder in given["folders"])
    print(json.dumps([len(tiny.tensors(one)), len(tiny.differences(one, other))]))
    return 0


def check(device: str, folder: Path) -> Iterator[Row]:
    """Ask what has changed in upstream's functions, and train with MEGATRON_NPU_DRIFT=warn."""
    said = _run(MAIN, device, ["-m", "megatron_npu", "check", "--megatron", str(TREE)])
    yield {"what": "check", "found": said.strip().splitlines()[-1]}
    data = tiny.write_dataset(folder / "numbers")
    losses: list[list[float]] = []
    for variables in ({}, {"MEGATRON_NPU_DRIFT": "warn"}):
        log = folder / f"{len(losses)}.jsonl"
        _run(MAIN, device, _driver(*tiny.flags_for(data), "--json-log", str(log)), 1, **variables)
        losses.append([row["loss"] for row in tiny.rows(log)])
    yield {"what": "MEGATRON_NPU_DRIFT=warn against none", "found": deviation(losses[1], losses[0])}


PARTS: dict[str, Callable[[str, Path], Iterator[Row]]] = {
    "transformers": transformers,
    "layouts": layouts,
    "resume": resume,
    **main_scripts.PARTS,
    "check": check,
}
ON_DEVICES = tuple(name for name in PARTS if name != "check")


if __name__ == "__main__":
    sys.exit(main())
