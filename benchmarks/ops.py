"""Compare every operation except attention with megatron-core's unfused code and torch's best call.

    python benchmarks/ops.py --rounds 15 [--only gelu] [--plot]

The variants take turns, round by round in one process, and the fastest round counts, so that other load on
the machine affects all of them equally; quote the ratios. A rate is the memory that an operation must at
least read and write, divided by its time, relative to the rate of a copy measured in between. Needs the extra
core. Results go to benchmarks/results/ops.json.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import report
import upstream

RESULT = report.RESULTS / "ops.json"
TOKENS, HIDDEN, VOCABULARY, PARAMETERS = 1024, 1024, 50304, 20_000_000


@dataclass(frozen=True)
class Work:
    """One operation on one set of tensors.

    Attributes:
        calls: variants by name; each takes ``leaves`` and returns a tensor.
        leaves: tensors that require gradients.
        passes: the minimum number of reads and writes of ``unit`` bytes: forward, and forward with backward.
        unit: bytes of the operation's largest tensor.
    """

    calls: dict[str, Callable[..., Any]]
    leaves: list[Any]
    passes: tuple[float, float]
    unit: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--only", default="", help="measure only operations whose name contains this text, and write no file"
    )
    parser.add_argument("--plot", action="store_true", help="also draw benchmarks/results/ops.png")
    parser.add_argument("--redraw", action="store_true", help="draw the rows of ops.json without measuring")
    arguments = parser.parse_args()
    if arguments.redraw:
        draw(json.loads(RESULT.read_text(encoding="utf-8"))["rows"])
        return
    import torch

    from megatron_npu import devices
    from megatron_npu.upstream import megatrons as upstream

    upstream.start_megatron()
    torch.set_num_threads(1)  # processor time is time only then
    gc.disable()  # nothing here is in cycles, and a collection would empty the caches
    rows = []
    for name, build in DIFFERENTIABLE.items():
        for dtype in (torch.float32, torch.bfloat16):
            if arguments.only in name:
                rows += differentiable(name, build(dtype), dtype, arguments.rounds)
    for name, build in IN_PLACE.items():
        if arguments.only in name:
            rows.append(measure(name, build(), torch.float32, arguments.rounds, "step", 0))
    if arguments.only and arguments.only != "memory":
        return
    memory = [cross_entropy_memory(dtype) for dtype in ("float32", "bfloat16")]
    if arguments.only:
        return
    results = {"rows": rows, "cross_entropy_memory": memory, "rounds": arguments.rounds}
    results["device"] = devices.current().name
    report.write(RESULT, results, megatron_core=upstream.find().version)
    if arguments.plot:
        draw(rows)


# -- what is measured: passes count reads and writes of the largest tensor --------------------------


def leaf(dtype: Any, *shape: int) -> Any:
    import torch

    from megatron_npu import devices

    return torch.randn(shape, device=devices.current().torch_device()).to(dtype).requires_grad_()


def layer_norm(dtype: Any) -> Work:
    from torch.nn import functional

    from megatron_npu.ops import norm

    x, weight, bias = leaf(dtype, TOKENS, HIDDEN), leaf(dtype, HIDDEN), leaf(dtype, HIDDEN)

    def stock(x, weight, bias):
        return functional.layer_norm(x, (HIDDEN,), weight, bias, 1e-5)

    calls = {"project": lambda x, w, b: norm.layer_norm(x, w, b, 1e-5), "stock": stock, "library": stock}
    return Work(calls, [x, weight, bias], (2, 5), x.nbytes)


def rms_norm(dtype: Any) -> Work:
    from torch.nn import functional

    from megatron_npu.ops import norm

    x, weight = leaf(dtype, TOKENS, HIDDEN), leaf(dtype, HIDDEN)

    def stock(x, weight):
        return functional.rms_norm(x, (HIDDEN,), weight, 1e-5)

    calls = {"project": lambda x, w: norm.rms_norm(x, w, 1e-5), "stock": stock, "library": stock}
    return Work(calls, [x, weight], (2, 5), x.nbytes)


def bias_gelu(dtype: Any) -> Work:
    from torch.nn import functional

    from megatron_npu.ops import activation

    x, bias = leaf(dtype, TOKENS, 2 * HIDDEN), leaf(dtype, 2 * HIDDEN)
    calls = {
        "project": activation.bias_gelu,
        "stock": upstream.untouched("megatron.core.fusions.fused_bias_gelu").bias_gelu_impl,
        "library": lambda x, b: functional.gelu(x + b, approximate="tanh"),
    }
    return Work(calls, [x, bias], (2, 5), x.nbytes)


def gated(dtype: Any, kind: str, with_bias: bool) -> Work:
    from torch.nn import functional

    from megatron_npu.ops import activation

    stock = getattr(upstream.untouched(f"megatron.core.fusions.fused_bias_{kind}"), f"bias_{kind}_impl")

    def library(x, bias=None):
        gate, value = (x if bias is None else x + bias).chunk(2, -1)
        silu = kind == "swiglu"
        return (functional.silu(gate) if silu else functional.gelu(gate, approximate="tanh")) * value

    x = leaf(dtype, TOKENS, 1, 2 * HIDDEN)
    leaves = [x, leaf(dtype, 2 * HIDDEN)] if with_bias else [x]
    calls = {
        "project": getattr(activation, kind),
        "stock": stock if with_bias else lambda x: stock(x, None),
        "library": library,
    }
    return Work(calls, leaves, (1.5, 4), x.nbytes)


def bias_dropout_add(dtype: Any) -> Work:
    from megatron_npu.ops.dropout import bias_dropout_add as ours

    stock = upstream.untouched("megatron.core.fusions.fused_bias_dropout").get_bias_dropout_add(True, False)
    x, bias, rest = leaf(dtype, TOKENS, HIDDEN), leaf(dtype, HIDDEN), leaf(dtype, TOKENS, HIDDEN)
    calls = {
        "project": lambda x, b, r: ours(x, b, r, 0.1, True),
        "stock": lambda x, b, r: stock((x, b), r, 0.1),
        "library": lambda x, b, r: stock((x, b), r, 0.1),
    }
    byte = 1 / rest.element_size()
    return Work(calls, [x, bias, rest], (3 + byte, 5 + 2 * byte), rest.nbytes)


def softmax(dtype: Any) -> Work:
    import torch
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.utils import attention_mask_func

    from megatron_npu.ops.softmax import scale_mask_softmax

    module = upstream.untouched("megatron.core.fusions.fused_softmax")
    half = dtype is torch.bfloat16
    layer = module.FusedScaleMaskSoftmax(
        False, half, AttnMaskType.causal, True, attention_mask_func, True, 0.5
    )
    x = leaf(dtype, 1, 8, 512, 512)
    calls = {
        "project": lambda x: scale_mask_softmax(x, None, 0.5, True),
        "stock": lambda x: layer.forward_torch_softmax(x, None),
        "library": lambda x: torch.softmax(x, -1),
    }
    return Work(calls, [x], (2, 5), x.nbytes)


def rotary(dtype: Any) -> Work:
    import torch

    from megatron_npu.ops.rotary import rotary as ours

    stock = upstream.untouched("megatron.core.models.common.embeddings.rope_utils")._apply_rotary_pos_emb_bshd
    x, angles = leaf(dtype, 512, 2, 16, 64), torch.rand(512, 1, 1, 64) * 100
    calls = {"project": lambda x: ours(x, angles), "stock": lambda x: stock(x, angles)}
    return Work(calls, [x], (2, 4), x.nbytes)


def embedding(dtype: Any) -> Work:
    import torch
    from torch.nn import functional

    from megatron_npu.ops.embedding import vocab_parallel_embedding

    weight, ids = leaf(dtype, VOCABULARY, 256), torch.randint(VOCABULARY, (4, TOKENS))
    calls = {
        "project": lambda w: vocab_parallel_embedding(ids, w, 0, VOCABULARY, split=False),
        "stock": lambda w: functional.embedding(ids, w),
    }
    output = 4 * TOKENS * 256 * weight.element_size()
    return Work(calls, [weight], (2, 3 + weight.nbytes / output), output)


def cross_entropy(dtype: Any, copied: bool = True) -> Work:
    """Pass each variant a copy of the logits, as a layer would: it may reuse their memory."""
    import torch
    from torch.nn import functional

    from megatron_npu.ops.cross_entropy import vocab_parallel_cross_entropy

    stock = upstream.untouched("megatron.core.tensor_parallel.cross_entropy").vocab_parallel_cross_entropy
    logits, target = leaf(dtype, 256, 1, VOCABULARY), torch.randint(VOCABULARY, (256, 1))
    whole = {"vocab_start": 0, "vocab_size": VOCABULARY}

    def handed(x):
        return x * 1 if copied else x.view_as(x)

    calls = {
        "project": lambda x: vocab_parallel_cross_entropy(handed(x), target, **whole),
        "stock": lambda x: stock(handed(x), target),
        "library": lambda x: functional.cross_entropy(
            handed(x).flatten(0, 1).float(), target.flatten(), reduction="none"
        ).view(target.shape),
    }
    return Work(calls, [logits], (3, 5), logits.nbytes)


DIFFERENTIABLE: dict[str, Callable[[Any], Work]] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "bias_gelu": bias_gelu,
    "swiglu": functools.partial(gated, kind="swiglu", with_bias=False),
    "bias_swiglu": functools.partial(gated, kind="swiglu", with_bias=True),
    "bias_geglu": functools.partial(gated, kind="geglu", with_bias=True),
    "bias_dropout_add": bias_dropout_add,
    "scale_mask_softmax": softmax,
    "rotary": rotary,
    "vocab_parallel_embedding": embedding,
    "cross_entropy": cross_entropy,
}


def parameters() -> list[Any]:
    """Return eight tensors, each with a gradient."""
    import torch

    tensors = [leaf(torch.float32, PARAMETERS // 8) for _ in range(8)]
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor) * 1e-3
    return tensors


def adam() -> Work:
    import torch

    from megatron_npu.ops.optimizers.adam import FusedAdam

    options = {"lr": 1e-4, "weight_decay": 0.1}
    optimizers = {
        "project": FusedAdam(parameters(), **options),
        "stock": torch.optim.AdamW(parameters(), **options),
        "library": torch.optim.AdamW(parameters(), **options, fused=True),
    }
    # reads parameter, gradient and two moments; writes all but the gradient
    return Work({name: o.step for name, o in optimizers.items()}, [], (7,), 4 * PARAMETERS)


def sgd() -> Work:
    import torch

    from megatron_npu.ops.optimizers.sgd import FusedSGD

    options = {"lr": 1e-4, "weight_decay": 0.1, "momentum": 0.9}
    optimizers = {
        "project": FusedSGD(parameters(), **options),
        "stock": torch.optim.SGD(parameters(), **options),
        "library": torch.optim.SGD(parameters(), **options, fused=True),
    }
    return Work({name: o.step for name, o in optimizers.items()}, [], (5,), 4 * PARAMETERS)


def l2norm() -> Work:
    import torch
    from megatron.core.utils import local_multi_tensor_l2_norm

    from megatron_npu.ops.optimizers.multi_tensor import multi_tensor_l2norm

    grads = [p.grad for p in parameters()]
    calls = {
        "project": lambda: multi_tensor_l2norm(0, None, [grads]),
        "stock": lambda: local_multi_tensor_l2_norm(0, None, [grads], False),
        "library": lambda: torch._foreach_norm(grads),
    }
    return Work(calls, [], (1,), 4 * PARAMETERS)


def scale() -> Work:
    import torch
    from megatron.core.utils import local_multi_tensor_scale

    from megatron_npu.ops.optimizers.multi_tensor import multi_tensor_scale

    grads, flag = [p.grad for p in parameters()], torch.zeros(1, dtype=torch.int32)
    calls = {
        "project": lambda: multi_tensor_scale(0, flag, [grads, grads], 0.999),
        "stock": lambda: local_multi_tensor_scale(0, None, [grads, grads], 0.999),
        "library": lambda: torch._foreach_mul_(grads, 0.999),
    }
    return Work(calls, [], (2,), 4 * PARAMETERS)


IN_PLACE: dict[str, Callable[[], Work]] = {"adam": adam, "sgd": sgd, "l2norm": l2norm, "scale": scale}


# -- measuring --------------------------------------------------------------------------------------


def clock() -> float:
    """Return seconds: CPU time on a CPU, which other load affects less, else synchronized wall time."""
    from megatron_npu import devices

    if devices.current().name == "cpu":
        return time.process_time()
    devices.current().synchronize()
    return time.perf_counter()


def once(call: Callable[[], Any]) -> float:
    start = clock()
    call()
    return clock() - start


def differentiable(name: str, work: Work, dtype: Any, rounds: int) -> list[dict]:
    """Measure forward without gradients, and forward with backward."""
    import torch

    def forward(call: Callable) -> Callable[[], Any]:
        return lambda: call(*work.leaves)

    grad = torch.randn_like(next(iter(work.calls.values()))(*work.leaves))

    def both(call: Callable) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(*work.leaves), work.leaves, grad)

    with torch.no_grad():
        once_each = Work({n: forward(c) for n, c in work.calls.items()}, [], work.passes, work.unit)
        rows = [measure(name, once_each, dtype, rounds, "forward", 0)]
    twice = Work({n: both(c) for n, c in work.calls.items()}, [], work.passes, work.unit)
    return [*rows, measure(name, twice, dtype, rounds, "forward+backward", 1)]


def measure(name: str, work: Work, dtype: Any, rounds: int, kind: str, index: int) -> dict:
    """Run the variants and a copy in turn; return the fastest time of each, and the rates."""
    import torch

    source = torch.randn(max(1 << 16, work.unit // 4))
    target = torch.empty_like(source)
    calls = {**work.calls, "copy": lambda: target.copy_(source)}
    best = dict.fromkeys(calls, float("inf"))
    order = list(calls.items())
    for turn in range(rounds + 2):
        random.Random(turn).shuffle(order)  # none always finds the caches as the same other one left them
        for variant, call in order:
            elapsed = once(call)
            if turn > 1:  # the first rounds warm up
                best[variant] = min(best[variant], elapsed)
    copy_rate = 2 * source.nbytes / best.pop("copy")
    moved = work.passes[index] * work.unit
    row = {
        "operation": name,
        "dtype": str(dtype).removeprefix("torch."),
        "pass": kind,
        "milliseconds": {variant: round(1e3 * value, 3) for variant, value in best.items()},
        "times_stock": round(best["stock"] / best["project"], 2),
        "gigabytes_per_second": round(moved / best["project"] / 1e9, 2),
        "copy_gigabytes_per_second": round(copy_rate / 1e9, 2),
        "share_of_copy": {variant: round(moved / value / copy_rate, 3) for variant, value in best.items()},
    }
    share = f"{row['share_of_copy']['project']:.0%} of copy"
    print(f"{name:<26} {row['dtype']:<9} {kind:<17}", row["milliseconds"], row["times_stock"], share)
    return row


def cross_entropy_memory(dtype_name: str) -> dict:
    """Return the peak bytes that forward and backward hold besides the logits, by variant.

    All tensors returned by operations are counted, so that no allocator hides any memory.
    """
    import torch

    peaks = {}
    for variant in ("project", "stock", "library"):
        work = cross_entropy(getattr(torch, dtype_name), copied=False)
        (logits,) = work.leaves
        peaks[variant] = peak_memory(work.calls[variant], logits)
    row = {
        "dtype": dtype_name,
        "logits_bytes": logits.nbytes,
        "peak_bytes": peaks,
        "of_stock": round(peaks["project"] / peaks["stock"], 4),
    }
    print("cross_entropy memory", row, flush=True)
    return row


def peak_memory(call: Callable, logits: Any) -> int:
    """Return the peak bytes of storages alive at once, not counting that of ``logits``."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.live: dict[int, tuple[StorageWeakRef, int]] = {}
            self.peak = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            self.live = {key: pair for key, pair in self.live.items() if not pair[0].expired()}
            for tensor in tree_leaves(result):
                storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
                if storage is not None and storage.data_ptr() != logits.data_ptr():
                    self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            self.peak = max(self.peak, sum(size for _, size in self.live.values()))
            return result

    with Watch() as watch:
        torch.autograd.grad(call(logits).sum(), logits)
    return watch.peak


# -- results ----------------------------------------------------------------------------------------


def draw(rows: list[dict]) -> None:
    """Plot each operation's fraction of the copy rate, for the project and stock."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from megatron_npu.base import files

    short = {"float32": "fp32", "bfloat16": "bf16"}
    labels = [f"{r['operation']} {short[r['dtype']]} {r['pass']}" for r in rows]
    figure, axes = pyplot.subplots(figsize=(7, 0.22 * len(rows) + 1))
    for offset, variant in ((-0.2, "project"), (0.2, "stock")):
        shares = [r["share_of_copy"][variant] for r in rows]
        axes.barh([i + offset for i in range(len(rows))], shares, 0.4, label=variant)
    axes.set_yticks(range(len(rows)), labels, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("share of the rate of a copy")
    axes.legend()
    figure.tight_layout()
    with files.writing(RESULT.with_suffix(".png")) as stream:
        figure.savefig(stream, format="png", dpi=80)


if __name__ == "__main__":
    main()
