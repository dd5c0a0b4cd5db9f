"""Tokens per second of a training step: this project, the redirection alone, Hugging Face, the matmul floor.

    python benchmarks/train.py --model demo --dtype bf16 --rounds 3

Each variant runs in a process of its own, in turn, round by round, so that a machine whose speed drifts
treats them alike; quote the ratios. Needs the extras core and hf. Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report

MODELS = {
    "demo": {"layers": 8, "hidden": 320, "heads": 5, "seq": 256, "batch": 4},
    "gpt2-124m": {"layers": 12, "hidden": 768, "heads": 12, "seq": 512, "batch": 2},
}
VOCABULARY = 50304
VARIANTS = ("project", "redirection", "huggingface", "floor")
# What is left out in "redirection": everything that makes Megatron faster and not just run (in bf16 it does
# not run without fused_softmax, and the driver's checkpoints need our Adam).
FUSED = (
    "megatron.core.transformer.dot_product_attention",
    "megatron.core.transformer.torch_norm",
    "megatron.core.tensor_parallel.cross_entropy",
    "megatron.core.fusions.fused_bias_dropout",
    "megatron.core.fusions.fused_bias_gelu",
    "megatron.core.fusions.fused_cross_entropy",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.tensor_parallel.layers:VocabParallelEmbedding",
)


def main() -> None:
    """Measure all variants, or one (in a child)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--variant", choices=VARIANTS, help="measure this one and print its tokens/s")
    arguments = parser.parse_args()
    if arguments.variant:
        speed = globals()[f"measure_{arguments.variant}"](MODELS[arguments.model], arguments)
        print(json.dumps({"tokens_per_second": speed}))
        return
    speeds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(arguments.rounds):
        for variant in VARIANTS:
            speeds[variant].append(run_child(variant, arguments))
            print(f"{variant:<12} {speeds[variant][-1]:10.1f} tokens/s", flush=True)
    write(arguments, speeds)


def run_child(variant: str, arguments: argparse.Namespace) -> float:
    """Run one variant in a fresh process; return its tokens per second."""
    command = [sys.executable, __file__, "--variant", variant, "--model", arguments.model]
    command += ["--dtype", arguments.dtype, "--steps", str(arguments.steps)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout.strip().splitlines()[-1])["tokens_per_second"]


def write(arguments: argparse.Namespace, speeds: dict[str, list[float]]) -> None:
    """Print the medians and ratios and write them, with the machine, as JSON."""
    import transformers

    from megatron_npu import upstream

    medians = {variant: statistics.median(values) for variant, values in speeds.items()}
    ratios = {other: medians["project"] / medians[other] for other in VARIANTS[1:]}
    results = {
        "model": {"name": arguments.model, **MODELS[arguments.model]},
        "dtype": arguments.dtype,
        "tokens_per_second": speeds,
        "project_over": ratios,
    }
    versions = {"megatron_core": upstream.find().version, "transformers": transformers.__version__}
    report.write(report.RESULTS / f"train-{arguments.model}-{arguments.dtype}-cpu.json", results, **versions)
    for other, ratio in ratios.items():
        print(f"project / {other:<12} {ratio:.2f}")


def timed(step, model: dict, steps: int) -> float:
    """Return tokens per second of the median step; the first two warm up."""
    times = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return model["batch"] * model["seq"] / statistics.median(times[2:])


def measure_project(model: dict, arguments: argparse.Namespace) -> float:
    """The embedded driver with every patch."""
    from megatron_npu.training import arguments as flags
    from megatron_npu.training import pretrain

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "metrics.jsonl"
        options = {
            "num-layers": model["layers"],
            "hidden-size": model["hidden"],
            "num-attention-heads": model["heads"],
            "seq-length": model["seq"],
            "max-position-embeddings": model["seq"],
            "micro-batch-size": model["batch"],
            "global-batch-size": model["batch"],
            "train-iters": arguments.steps + 2,
            "lr": 1e-4,
            "tokenizer-type": "NullTokenizer",
            "vocab-size": VOCABULARY - 1,
            "attention-dropout": 0,
            "hidden-dropout": 0,
            "eval-iters": 0,
            "log-interval": 1,
            "json-log": log,
        }
        argv = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        argv += ["--mock-data", "--no-plot", *(["--bf16"] if arguments.dtype == "bf16" else [])]
        with open(os.devnull, "w") as quiet:
            out, sys.stdout = sys.stdout, quiet
            try:
                pretrain.train(flags.parse(argv))
            finally:
                sys.stdout = out
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    return statistics.median(steps[2:])


def measure_redirection(model: dict, arguments: argparse.Namespace) -> float:
    """The same driver on Megatron's own unfused code: only what makes it run is patched."""
    from megatron_npu import adaptors, settings
    from megatron_npu.patching.registry import registry

    os.environ[settings.KEEP_MEMORY.name] = "0"
    adaptors.register("megatron_core")
    registry.keep(lambda patch: not patch.target.startswith(FUSED))
    return measure_project(model, arguments)


def measure_huggingface(model: dict, arguments: argparse.Namespace) -> float:
    """GPT2LMHeadModel with sdpa attention and torch's fused AdamW; bf16 through autocast."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=model["seq"],
        n_embd=model["hidden"],
        n_layer=model["layers"],
        n_head=model["heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
    )
    network = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(VOCABULARY, (model["batch"], model["seq"]))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.dtype == "bf16"):
            loss = network(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, model, arguments.steps)


def measure_floor(model: dict, arguments: argparse.Namespace) -> float:
    """Only the matrix products of the step: forward, gradient of the input, gradient of the weight."""
    import torch

    dtype = torch.bfloat16 if arguments.dtype == "bf16" else torch.float32
    hidden, tokens = model["hidden"], model["batch"] * model["seq"]
    sizes = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
    products = [(*size, model["layers"]) for size in sizes] + [(hidden, VOCABULARY, 1)]
    operands = [
        [torch.randn(shape, dtype=dtype) for shape in ((tokens, i), (o, i), (tokens, o))]
        for i, o, _ in products
    ]
    heads = torch.randn(model["batch"] * model["heads"], model["seq"], hidden // model["heads"], dtype=dtype)
    scores = torch.randn(model["batch"] * model["heads"], model["seq"], model["seq"], dtype=dtype)

    def step() -> None:
        for (x, weight, grad), (_, _, times) in zip(operands, products, strict=True):
            for _ in range(times):
                x @ weight.t()
                grad @ weight
                grad.t() @ x
        for _ in range(3 * model["layers"]):  # forward and the two gradients of each product
            heads @ heads.transpose(1, 2)
            scores @ heads

    return timed(step, model, arguments.steps)


if __name__ == "__main__":
    main()
