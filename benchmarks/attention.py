"""Compare this project's attention with megatron-core's unfused DotProductAttention and torch's best call.

    python benchmarks/attention.py --rounds 5

The variants take turns, round by round in one process, so that changes in the machine's speed affect all of
them equally; quote the ratios. Needs the extra core. Results go to benchmarks/results/attention.json.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import ModuleType

import report
import upstream

RESULT = report.RESULTS / "attention.json"
HEAD_SIZE = 64


@dataclass(frozen=True)
class Case:
    """A benchmark setting, in megatron-core's terms; all settings are causal self-attention."""

    name: str
    length: int
    heads: int = 12
    groups: int = 12
    window: int | None = None
    documents: int = 1
    dropout_p: float = 0.0
    queries: int | None = None  # fewer than keys: decoding


CASES = (
    Case("causal, 512", 512),
    Case("causal, 1024", 1024),
    Case("causal, grouped 12:2, 1024", 1024, groups=2),
    Case("dropout 0.1, 1024", 1024, dropout_p=0.1),
    Case("8 documents, 2048", 2048, heads=4, groups=4, documents=8),
    Case("window 2048, 8192", 8192, heads=1, groups=1, window=2048),
    Case("decoding, 1 of 2048", 2048, queries=1),
)
GROWTH_WINDOWS = (128, 256, 2048)
GROWTH_LENGTHS = (2048, 4096, 8192, 16384)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", default="", help="measure only cases whose name contains this text, and write no file"
    )
    arguments = parser.parse_args()
    import torch

    from megatron_npu import devices
    from megatron_npu.upstream import megatrons as upstream

    upstream.start_megatron()
    torch.set_num_threads(1)  # processor time is time only then
    rows = [
        row
        for case in CASES
        if arguments.only in case.name
        for dtype in ("fp32", "bf16")
        for row in compare(case, dtype, arguments.rounds)
    ]
    if arguments.only:
        return
    growth = [
        grow(window, dtype, arguments.rounds) for window in GROWTH_WINDOWS for dtype in ("fp32", "bf16")
    ]
    results = {"rows": rows, "growth": growth, "rounds": arguments.rounds, "head_size": HEAD_SIZE}
    results["device"] = devices.current().name
    report.write(RESULT, results, megatron_core=upstream.find().version)


# -- variants: each a function of (query, key, value) ------------------------------------------------


def variants(case: Case, dtype: str) -> dict[str, Callable]:
    """Return the variants: this project, megatron-core, and torch's own call, with a mask if required."""
    import torch
    from megatron.core.transformer import dot_product_attention as ours
    from torch.nn import functional

    stock = upstream.untouched("megatron.core.transformer.dot_product_attention")
    mask = document_mask(case)
    calls: dict[str, Callable] = {}
    for name, module in {"project": ours, "stock": stock}.items():
        calls[name] = functools.partial(core_attention(module, case, dtype), attention_mask=mask)
    plain = case.window is None and case.documents == 1
    seen = None if plain else visible(case)

    def library(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        tensors = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        causal = plain and case.queries is None
        output = functional.scaled_dot_product_attention(
            *tensors, attn_mask=seen, is_causal=causal, dropout_p=case.dropout_p, enable_gqa=True
        )
        return output.permute(2, 0, 1, 3).flatten(2)

    calls["sdpa"] = library
    return calls


def core_attention(module: ModuleType, case: Case, dtype: str) -> Callable:
    """Return a DotProductAttention from ``module``, in training mode."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.heads * HEAD_SIZE,
        num_attention_heads=case.heads,
        num_query_groups=case.groups,
        attention_dropout=case.dropout_p,
        attention_softmax_in_fp32=True,
        window_size=None if case.window is None else (case.window, 0),
        bf16=dtype == "bf16",
    )
    return module.DotProductAttention(config, 1, AttnMaskType.causal, "self").train()


def visible(case: Case):
    """Return a mask ``[s, s]``, which is True where a query attends to a key."""
    import torch

    position = torch.arange(case.length)
    document = position * case.documents // case.length
    seen = (position <= position[:, None]) & (document == document[:, None])
    return seen if case.window is None else seen & (position >= position[:, None] - case.window)


def document_mask(case: Case):
    """Return the mask ``[1, 1, s, s]`` of Megatron's dataset with --reset-attention-mask, or None."""
    return None if case.documents == 1 else ~visible(case)[None, None]


# -- measuring --------------------------------------------------------------------------------------


def leaves(case: Case, dtype: str):
    import torch

    torch.manual_seed(0)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    queries = case.queries or case.length
    shapes = [(queries, case.heads), (case.length, case.groups), (case.length, case.groups)]
    return [torch.randn(s, 1, n, HEAD_SIZE).to(kind).requires_grad_() for s, n in shapes]


def once(call: Callable, tensors: list, backward: bool) -> float:
    """Return the seconds of a forward pass, or of forward and backward, on one core.

    This is CPU time, which other processes on the machine hardly affect.
    """
    import torch

    gc.collect()
    for tensor in tensors:
        tensor.grad = None
    with torch.set_grad_enabled(backward):
        start = time.process_time()
        output = call(*tensors)
        if backward:
            output.backward(output.detach())
        return time.process_time() - start


def compare(case: Case, dtype: str, rounds: int) -> list[dict]:
    """Measure all variants of one case; return one row for forward, and one for forward and backward."""
    tensors, calls = leaves(case, dtype), variants(case, dtype)
    rows = []
    for backward in (False, True) if case.queries is None else (False,):
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds + 1):
            for name, call in calls.items():
                elapsed = once(call, tensors, backward)
                if turn:  # the first round warms up
                    seconds[name].append(elapsed)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        row = {
            **asdict(case),
            "dtype": dtype,
            "pass": "forward+backward" if backward else "forward",
            "milliseconds": {name: round(1e3 * value, 3) for name, value in medians.items()},
            "times_stock": round(medians["stock"] / medians["project"], 2),
            "times_sdpa": round(medians["sdpa"] / medians["project"], 2),
        }
        print(
            f"{case.name:<28} {dtype} {row['pass']:<17}", row["milliseconds"], row["times_stock"], flush=True
        )
        rows.append(row)
    return rows


def grow(window: int, dtype: str, rounds: int) -> dict:
    """Measure forward and backward for one window at growing sequence lengths; return times and growth."""
    cases = [Case(f"window {window}", s, heads=2, groups=2, window=window) for s in GROWTH_LENGTHS]
    import megatron.core.transformer.dot_product_attention as ours

    work = [(leaves(c, dtype), core_attention(ours, c, dtype)) for c in cases]
    seconds: list[list[float]] = [[] for _ in cases]
    for turn in range(rounds + 1):
        for index, (tensors, attend) in enumerate(work):
            elapsed = once(functools.partial(attend, attention_mask=None), tensors, True)
            if turn:
                seconds[index].append(elapsed)
    medians = [statistics.median(values) for values in seconds]
    pairs = [sum(min(i, window) + 1 for i in range(s)) for s in GROWTH_LENGTHS]
    result = {
        "window": window,
        "dtype": dtype,
        "lengths": GROWTH_LENGTHS,
        "milliseconds": [round(1e3 * value, 2) for value in medians],
        "growth": round(medians[-1] / medians[0], 2),
        "growth_of_visible_pairs": round(pairs[-1] / pairs[0], 2),
    }
    print(result, flush=True)
    return result


if __name__ == "__main__":
    main()
