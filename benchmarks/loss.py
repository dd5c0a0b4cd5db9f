"""Output layer and loss: through the logits, and fused, with logits stored or recomputed.

    megatron-npu sim -- python benchmarks/loss.py     # launches and peak bytes of a step on a simulated NPU
    python benchmarks/loss.py --rounds 9              # CPU time of forward and backward on a CPU

On the simulated NPU a step is that of a GPT with one layer (hidden 256) in bf16: forward and backward, and
the peak above the memory in use before. On a CPU the variants take turns, round by round in one process with
one thread, and the fastest round counts, so that other load on the machine affects all of them equally; the
weight's gradient is accumulated in an fp32 buffer as in training. Results go to
benchmarks/results/loss-{npu,cpu}.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import report

VOCABULARIES = (50304, 131072)
TOKENS, WORDS = 1024, 50304  # of the cpu's products
WIDTHS = {"demo": 320, "gpt2-124m": 768}
LINEAR = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}


def main() -> None:
    """Measure what this process's device can show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--one", nargs=2, metavar=("VARIANT", "VOCABULARY"), help="count only this combination"
    )
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(counted(arguments.one[0], int(arguments.one[1]))))
        return
    from megatron_npu import devices

    if devices.current().name == "npu":
        report.write(report.RESULTS / "loss-npu.json", {"tokens": TOKENS, "steps": all_counts()})
    else:
        rows = [row for name, width in WIDTHS.items() for row in times(name, width, arguments.rounds)]
        report.write(report.RESULTS / "loss-cpu.json", {"tokens": TOKENS, "words": WORDS, "rows": rows})


# -- on the simulated NPU ---------------------------------------------------------------------------


def all_counts() -> dict[str, dict[str, Any]]:
    """Return launches and peak of each variant, by vocabulary size, each measured in a separate process."""
    found: dict[str, dict[str, Any]] = {}
    for vocabulary in VOCABULARIES:
        costs = {variant: in_child(variant, vocabulary) for variant in ("logits", "linear")}
        ratio = costs["linear"]["peak_bytes"] / costs["logits"]["peak_bytes"]
        found[str(vocabulary)] = {**costs, "peak_of_logits": ratio}
        for variant, cost in costs.items():
            print(f"{vocabulary:7} {variant:7} {cost['launches']:4} launches, {cost['peak_bytes']:,} bytes")
        print(f"{vocabulary:7} linear / logits: peak {ratio:.2f}", flush=True)
    return found


def in_child(variant: str, vocabulary: int) -> dict[str, int]:
    """Count in a fresh process."""
    command = [sys.executable, __file__, "--one", variant, str(vocabulary)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout.strip().splitlines()[-1])


def counted(variant: str, vocabulary: int) -> dict[str, int]:
    """Return the cost of the second forward and backward pass; the first one is a warm-up."""
    import megatron_npu
    from megatron_npu.sim import counting

    megatron_npu.install()
    from launches import prepare_megatron_core

    options = LINEAR if variant == "linear" else {}
    training = prepare_megatron_core(
        "gpt", 1, TOKENS, vocabulary, gradient_accumulation_fusion=True, **options
    )
    for _ in range(2):
        for forget in training.forget:
            forget()
        with counting() as passes:
            training.loss().backward()
    return {"launches": passes.total_launches, "peak_bytes": passes.peak}


# -- on a cpu ---------------------------------------------------------------------------------------


def times(name: str, width: int, rounds: int) -> list[dict[str, Any]]:
    """Return the time of the fastest round of each variant in ms, for both dtypes."""
    import torch

    torch.set_num_threads(1)  # processor time is time only then
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        ways = cpu_ways(width, dtype)
        best = dict.fromkeys(ways, float("inf"))
        for turn in range(rounds + 1):  # the first warms up
            for way, call in ways.items():
                start = time.process_time()
                call()
                if turn:
                    best[way] = min(best[way], 1e3 * (time.process_time() - start))
        ratios = {way: best["logits"] / value for way, value in best.items()}
        rows.append({"model": name, "dtype": str(dtype), "milliseconds": best, "times_as_fast": ratios})
        print(name, dtype, {way: f"{ms:.0f} ms, {ratios[way]:.2f}" for way, ms in best.items()}, flush=True)
    return rows


def cpu_ways(width: int, dtype: Any) -> dict[str, Callable[[], None]]:
    """Return forward and backward for each variant; all accumulate into the same gradient buffer."""
    import torch

    from megatron_npu.ops.cross_entropy import vocab_parallel_cross_entropy
    from megatron_npu.ops.linear_cross_entropy import linear_cross_entropy

    hidden = torch.randn(TOKENS, 1, width).to(dtype).requires_grad_()
    weight = (torch.randn(WORDS, width) * 0.02).to(dtype).requires_grad_()
    target, main_grad = torch.randint(WORDS, (TOKENS, 1)), torch.zeros(WORDS, width)
    product = output_layer()

    def through_logits() -> None:
        logits = product(hidden, weight, main_grad)
        vocab_parallel_cross_entropy(logits, target, vocab_start=0, vocab_size=WORDS).mean().backward()

    def in_one(recompute: bool) -> None:
        loss = linear_cross_entropy(hidden, weight, target, main_grad=main_grad, recompute=recompute)
        loss.mean().backward()

    return {
        "logits": through_logits,
        "kept": functools.partial(in_one, False),
        "computed again": functools.partial(in_one, True),
    }


def output_layer() -> Callable[..., Any]:
    """Return the matmul as in Megatron's linear layer with --gradient-accumulation-fusion."""
    import torch

    from megatron_npu.ops.products.weight_gradient import accumulate_weight_gradient

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, main_grad: Any) -> Any:
            ctx.save_for_backward(hidden, weight)
            ctx.main_grad = main_grad
            return torch.matmul(hidden, weight.t())

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple:
            hidden, weight = ctx.saved_tensors
            accumulate_weight_gradient(hidden, grad, ctx.main_grad)
            return grad.matmul(weight), None, None

    return Product.apply


if __name__ == "__main__":
    main()
