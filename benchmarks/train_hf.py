"""Training steps of a Transformers model: its own Trainer, the Trainer with torch.compile, and this project.

    python benchmarks/train_hf.py --model bert --precision bf16 --json FILE

Random weights and tokens, dropout as in the model's config, one process with one thread; a step is forward,
backward, clipping and AdamW. This project's variants start like a run of ``train``, which keeps freed memory.
Each variant runs in a separate process, and their steps alternate (``turns.py``) after the first ones, in
which graphs are compiled. A ratio is the median over neighbouring steps: of CPU time on a CPU, of wall time
if MEGATRON_NPU_DEVICE names another device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import turns

WAYS = ("trainer", "trainer + compile", "ours", "ours + graph")
WARM_UP = 2


def main() -> None:
    """Measure every variant, print a table, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["bert", "gpt2"], default="bert")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument(
        "--steps", type=int, default=6, help="number of counted steps of each way; the ways take turns"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args)))
        return
    environment = {"OMP_NUM_THREADS": "1", "MEGATRON_NPU_DEVICE": device_name()}
    programs = [
        turns.Program(
            way, [sys.executable, __file__, *sys.argv[1:], "--one", way], environment, before=WARM_UP
        )
        for way in args.ways
    ]
    turns.measure(programs, args.steps)
    for one in programs:
        print(f"{one.name:20} {statistics.median(one.said['seconds']):6.2f} s a step", flush=True)
    report(args, {one.name: one.said for one in programs})


def device_name() -> str:
    """Return the device that the environment names; a CPU if it names none."""
    return os.environ.get("MEGATRON_NPU_DEVICE", "cpu")


def now() -> float:
    """Return CPU seconds on a CPU; elsewhere wall time, after the device has finished its work."""
    if device_name() == "cpu":
        return time.process_time()
    from megatron_npu import devices

    devices.current().synchronize()
    return time.perf_counter()


def report(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Print the ratios to the Trainer's variants; write everything."""
    ratios = {
        f"{ours} / {theirs}": statistics.median(
            slow / fast
            for slow, fast in zip(results[theirs]["seconds"], results[ours]["seconds"], strict=True)
        )
        for theirs in WAYS[:2]
        for ours in WAYS[2:]
        if theirs in results and ours in results
    }
    for name, ratio in ratios.items():
        print(f"{name:32} {ratio:.2f} x")
    if args.json:
        import torch
        import transformers
        from report import write

        torch.set_num_threads(1)  # as in each of the processes
        sizes = {name: getattr(args, name) for name in ("model", "layers", "batch", "seq_length")}
        measured = {
            "device": device_name(),
            "model": sizes,
            "dtype": args.precision,
            "ways": results,
            "ratios": ratios,
        }
        write(args.json, measured, transformers=transformers.__version__)


def measure(args: argparse.Namespace, on_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return the seconds and losses of a variant's steps; call ``on_step`` after each step of ours."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    if args.model == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=args.layers))
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=args.layers))
    samples = _samples(args, model.config.vocab_size)
    if args.one.startswith("trainer"):
        seconds, losses = _by_trainer(args, model, samples)
    else:
        seconds, losses = _by_us(args, model, samples, on_step)
    return {"seconds": seconds[WARM_UP:], "losses": losses}


def _samples(args: argparse.Namespace, vocabulary: int) -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range((WARM_UP + args.steps) * args.batch):
        ids = torch.randint(5, vocabulary, (args.seq_length,), generator=generator)
        asked = torch.rand(args.seq_length, generator=generator) < 0.15
        labels = ids.masked_fill(~asked, -100) if args.model == "bert" else ids
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return samples


def _by_trainer(
    args: argparse.Namespace, model: Any, samples: list[dict[str, Any]]
) -> tuple[list[float], list[float]]:
    import transformers

    seconds: list[float] = []
    losses: list[float] = []
    turn = turns.Turn()

    class Clock(transformers.TrainerCallback):
        """Measures the time from the beginning of a step to its end."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(now() - self.begin)
            turn.take()

        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            losses.extend([logs["loss"]] if logs and "loss" in logs else [])

    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=args.batch,
            max_steps=WARM_UP + args.steps,
            learning_rate=1e-4,
            bf16=args.precision == "bf16",
            torch_compile=args.one == "trainer + compile",
            use_cpu=device_name() == "cpu",
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            train_sampling_strategy="sequential",
        )
        transformers.Trainer(model, options, train_dataset=samples, callbacks=[Clock()]).train()
    return seconds, losses


def _by_us(
    args: argparse.Namespace, model: Any, samples: list[dict[str, Any]], on_step: Callable[[], None]
) -> tuple[list[float], list[float]]:
    import torch

    from megatron_npu import devices
    from megatron_npu.finetune.model.prepare import AdamOptions, prepare
    from megatron_npu.options.switches import Switches

    devices.current().prepare()
    device = devices.current().torch_device()
    switches = Switches(
        mixed_precision="bf16" if args.precision == "bf16" else None,
        fused_ops=True,
        graph_optimization=args.one == "ours + graph",
    )
    prepared = prepare(
        model.train(),
        None,
        None,
        switches,
        device=device,
        adam=AdamOptions(lr=1e-4, weight_decay=0.0),
        clip_grad=1.0,
    )
    seconds, losses, turn = [], [], turns.Turn()
    for step in range(WARM_UP + args.steps):
        rows = samples[step * args.batch : (step + 1) * args.batch]
        batch = {
            name: torch.stack([row[name] for row in rows]).to(device, non_blocking=True) for name in rows[0]
        }
        begin = now()
        with prepared.accumulating(last=True):
            with prepared.forward_context():
                loss = prepared.model(**batch).loss
            prepared.backward(loss)
        prepared.step()
        seconds.append(now() - begin)
        turn.take()
        losses.append(loss.item())
        on_step()
    return seconds, losses


if __name__ == "__main__":
    main()
