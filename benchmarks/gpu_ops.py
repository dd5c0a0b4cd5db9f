"""Compare operations on a GPU with the alternatives: flash-attn, cuDNN, Liger, torch.compile, plain torch.

    python benchmarks/gpu_ops.py [--only attention] [--output FILE.json]

Each variant runs forward and backward on the same tensors; a row has the median time of a call, its peak
memory without the inputs, and the distance of its result from torch's own in fp32. For a variant that is not
installed, or rejects the call, the row has the reason. ``--tiny`` is for a CPU: it shows that the script
runs, but its times are meaningless. Written without a GPU: the arguments for Liger and flash-attn follow
their documentation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch
import train
from torch import Tensor
from torch.nn import functional as F

from megatron_npu import devices
from megatron_npu.ops import activation, dispatch, norm
from megatron_npu.ops.attention import attention
from megatron_npu.ops.cross_entropy import cross_entropy
from megatron_npu.ops.linear_cross_entropy import linear_cross_entropy
from megatron_npu.ops.optimizers.adam import FusedAdam

RESULT = report.RESULTS / "gpu" / "operations.json"
EAGER = "torch"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a large model's layers.

    Attributes:
        tokens, hidden, feed_forward, words: for the point-wise operations and the losses.
        batch, heads, head: for attention; ``lengths`` are its sequence lengths.
        parameters: for the optimizer.
        window: number of previous tokens that a query attends to, in the windowed case.
    """

    tokens: int = 8192
    hidden: int = 4096
    feed_forward: int = 11008
    words: int = 50304
    batch: int = 2
    heads: int = 16
    head: int = 128
    lengths: tuple[int, ...] = (2048, 8192)
    parameters: int = 350_000_000
    window: int = 1024


TINY = Sizes(16, 32, 48, 96, 1, 2, 16, (32,), 1000, 8)
Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """One operation on one set of tensors.

    Attributes:
        leaves: the arguments of the variants; those that require gradients get one.
        variants: by name, each a function that returns the call; its imports may be missing.
    """

    leaves: list[Tensor]
    variants: dict[str, Callable[[], Call]]


def main() -> None:
    """Measure all cases, or those with a given word in their names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="measure only operations whose name contains this text")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="use small sizes, for a CPU")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    device = devices.current()
    dispatch_all(device.name)
    rows = []
    for name, build in cases(TINY if arguments.tiny else Sizes(), device.torch_device()):
        if arguments.only in name:
            rows += measured(name, build(), arguments.repeat)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    report.write(arguments.output, {"device": train.device_name(), "tiny": arguments.tiny, "rows": rows})


def dispatch_all(device: str) -> None:
    """Bind each operation to the device, as the plug-in does."""
    for operation in dispatch.OPERATIONS:
        operation.bind(device)


def measured(name: str, case: Case, repeat: int) -> Iterator[dict[str, Any]]:
    """Yield and print one row per variant."""
    expected = in_full_precision(case)
    for variant, build in case.variants.items():
        row: dict[str, Any] = {"operation": name, "variant": variant}
        try:
            row |= times(build(), case.leaves, expected, repeat)
            told = f"{row['milliseconds']:9.3f} ms, {row['peak_bytes'] / 2**20:8.0f} MiB"
            told += f", off by {row['difference']:.1e}" if row["difference"] is not None else ""
        except Exception as error:  # one variant does not end the others
            row["refused"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
            told = row["refused"]
        print(f"{name:<28} {variant:<22} {told}", flush=True)
        yield row


def in_full_precision(case: Case) -> Tensor | None:
    """Return torch's result for the case in fp32, or None if the case returns nothing."""
    if EAGER not in case.variants:
        return None
    with torch.no_grad():
        wide = [leaf.float() if leaf.is_floating_point() else leaf for leaf in case.leaves]
        return case.variants[EAGER]()(*wide).float()


def times(call: Call, leaves: list[Tensor], expected: Tensor | None, repeat: int) -> dict[str, Any]:
    """Return the milliseconds of a call with its backward pass, its memory, and its largest difference."""
    device = devices.current()
    on_gpu = device.name == "cuda"

    def once() -> Tensor | None:
        result = call(*leaves)
        if result is not None and result.requires_grad:
            result.backward(torch.ones_like(result))
        return result

    result = once()
    difference = None
    if result is not None and expected is not None:
        difference = ((result.float() - expected).abs().max() / expected.abs().max()).item()
    for _ in range(2):
        forget(leaves)
        once()
    taken = []
    for _ in range(repeat):
        forget(leaves)
        device.synchronize()
        before = device.memory().allocated if on_gpu else 0
        if on_gpu:
            device.reset_peak_memory()
        begin = time.perf_counter()
        once()
        device.synchronize()
        taken.append(1e3 * (time.perf_counter() - begin))
    peak = device.memory().peak - before if on_gpu else 0
    return {"milliseconds": statistics.median(taken), "peak_bytes": peak, "difference": difference}


def forget(leaves: list[Tensor]) -> None:
    """Clear the gradients before the next backward pass."""
    for leaf in leaves:
        leaf.grad = None


# -- the cases ------------------------------------------------------------------------------------


def cases(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield the name of each case, and a function that builds it with its tensors."""

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()

    def three(length: int) -> list[Tensor]:
        return [leaf(sizes.batch, sizes.heads, length, sizes.head) for _ in range(3)]

    tokens, hidden, longest = sizes.tokens, sizes.hidden, sizes.lengths[-1]
    for length in sizes.lengths:
        yield f"attention {length}", partial(lambda length: causal_attention(*three(length)), length)
    yield (
        f"attention {longest} window {sizes.window}",
        lambda: windowed_attention(*three(longest), window=sizes.window),
    )
    yield "layer_norm", lambda: layer_norm(leaf(tokens, hidden), leaf(hidden), leaf(hidden))
    yield "rms_norm", lambda: rms_norm(leaf(tokens, hidden), leaf(hidden))
    yield "swiglu", lambda: swiglu(leaf(tokens, 2 * sizes.feed_forward))
    targets = torch.randint(sizes.words, (tokens,), device=device)
    yield "cross_entropy", lambda: token_losses(leaf(tokens, sizes.words), targets)
    yield (
        "linear_cross_entropy",
        lambda: losses_of_hidden(leaf(tokens, hidden), leaf(sizes.words, hidden), targets),
    )
    yield "adam", lambda: adam(sizes.parameters, device)


def sdpa(kind: str) -> Callable[[], Call]:
    """Return torch's attention with one of its kernels."""

    def build() -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, kind)):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return call

    return build


def flash_attn(window: int = -1) -> Callable[[], Call]:
    """Return flash-attn's function, which expects ``[b, s, n, d]``."""
    seen = (window, 0 if window >= 0 else -1)

    def build() -> Call:
        from flash_attn import flash_attn_func

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            turned = (each.transpose(1, 2) for each in (q, k, v))
            return flash_attn_func(*turned, causal=True, window_size=seen).transpose(1, 2)

        return call

    return build


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Case:
    """Causal attention for [b, n, s, d]."""
    scale = q.size(-1) ** -0.5
    variants: dict[str, Callable[[], Call]] = {
        "project": lambda: lambda q, k, v: attention(q, k, v, layout="BNSD", scale=scale, causal=True),
        EAGER: lambda: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "torch flash": sdpa("FLASH_ATTENTION"),
        "torch cuDNN": sdpa("CUDNN_ATTENTION"),
        "torch efficient": sdpa("EFFICIENT_ATTENTION"),
        "flash-attn": flash_attn(),
    }
    return Case([q, k, v], variants)


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Case:
    """Causal attention within a window for [b, n, s, d]."""
    scale, length = q.size(-1) ** -0.5, q.size(2)

    def flex() -> Call:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def seen(b: Tensor, n: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) & (i - j <= window)

        blocks = create_block_mask(seen, None, None, length, length, device=q.device.type)
        compiled = torch.compile(flex_attention)
        return lambda q, k, v: compiled(q, k, v, block_mask=blocks)

    def masked() -> Call:
        distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        mask = (distance >= 0) & (distance <= window)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    variants: dict[str, Callable[[], Call]] = {
        "project": lambda: (
            lambda q, k, v: attention(q, k, v, layout="BNSD", scale=scale, causal=True, window=(window, None))
        ),
        EAGER: masked,
        "torch flex compiled": flex,
        "flash-attn": flash_attn(window),
    }
    return Case([q, k, v], variants)


def beside_compiled(ours: Call, plain: Call, liger: Callable[[], Call]) -> dict[str, Callable[[], Call]]:
    """Return the variants of an operation that torch.compile can fuse."""
    return {
        "project": lambda: ours,
        EAGER: lambda: plain,
        "torch.compile": lambda: torch.compile(plain, dynamic=False),
        "Liger": liger,
    }


def liger(name: str, given: Callable[..., tuple[Any, ...]]) -> Callable[[], Call]:
    """Return a function that imports Liger's; ``given`` converts a case's tensors to its arguments."""

    def build() -> Call:
        from liger_kernel.transformers import functional

        function = getattr(functional, f"liger_{name}")
        return lambda *leaves: function(*given(*leaves))

    return build


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Case:
    """Layer norm of [t, h]."""
    calls = beside_compiled(
        lambda x, w, b: norm.layer_norm(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
        liger("layer_norm", lambda x, w, b: (x, w, b, 1e-5)),
    )
    return Case([x, weight, bias], calls)


def rms_norm(x: Tensor, weight: Tensor) -> Case:
    """RMSNorm of [t, h]."""
    calls = beside_compiled(
        lambda x, w: norm.rms_norm(x, w, 1e-5),
        lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
        liger("rms_norm", lambda x, w: (x, w, 1e-5, 0.0, "llama", False)),  # not in place
    )
    return Case([x, weight], calls)


def swiglu(x: Tensor) -> Case:
    """SwiGLU of [t, 2f]."""

    def plain(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return F.silu(gate) * value

    calls = beside_compiled(
        activation.swiglu,
        plain,
        liger("swiglu", lambda x: tuple(half.contiguous() for half in x.chunk(2, -1))),
    )
    return Case([x], calls)


def token_losses(logits: Tensor, target: Tensor) -> Case:
    """Mean loss of [t, v]; each variant gets a copy of the logits, whose memory it may reuse."""

    def plain(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy((x * 1).float(), target)

    calls = beside_compiled(
        lambda x, target: cross_entropy(x * 1, target).mean(),
        plain,
        liger("cross_entropy", lambda x, target: (x * 1, target)),
    )
    return Case([logits, target], calls)


def losses_of_hidden(hidden: Tensor, weight: Tensor, target: Tensor) -> Case:
    """Mean loss of an output layer, [t, h] and [v, h]."""

    def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), target)

    calls = beside_compiled(
        lambda hidden, weight, target: linear_cross_entropy(hidden, weight, target).mean(),
        plain,
        liger("fused_linear_cross_entropy", lambda *leaves: leaves),
    )
    return Case([hidden, weight, target], calls)


def adam(size: int, device: torch.device) -> Case:
    """An optimizer step over fp32 parameters in eight tensors."""

    def stepping(kind: Any, **options: Any) -> Callable[[], Call]:
        def build() -> Call:
            tensors = [torch.randn(size // 8, device=device, requires_grad=True) for _ in range(8)]
            for tensor in tensors:
                tensor.grad = torch.randn_like(tensor)
            return kind(tensors, lr=1e-4, weight_decay=0.1, **options).step

        return build

    variants = {
        "project": stepping(FusedAdam),
        "torch fused": stepping(torch.optim.AdamW, fused=True),
        "torch foreach": stepping(torch.optim.AdamW, foreach=True),
    }
    return Case([], variants)


if __name__ == "__main__":
    main()
