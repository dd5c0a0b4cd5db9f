"""Compile the repeated blocks of a model, so that identical layers share one graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_npu import devices
from megatron_npu.finetune.model.blocks import repeated_blocks
from megatron_npu.options.switch_rules import need_compiler
from megatron_npu.process import graph_cache

# Lengths and modes (training, evaluation, with a mask and without) of one block's graphs; torch's own limit
# is 8, behind which it runs uncompiled silently that a user sees.
_GRAPHS_OF_A_BLOCK = 64
# Under these names configs of Transformers have the dropout of attention's weights.
_ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")


def compile_blocks(model: nn.Module, *, dynamic: bool) -> str:
    """Compile each Transformer block of ``model`` in place, and return a log line.

    Blocks differ only in their weights, so inductor compiles the first block, and the other blocks use its
    graph. The rest of the model (embeddings, head, loss) is not compiled. A model without blocks is compiled
    as a whole. Compilation happens in the first forward pass.

    On a CPU, graphs use the same random-number kernels as eager mode, because the code that inductor
    generates (torch 2.13) draws one value at a time, which makes a BERT step a fifth longer.

    Call this function after ``ops.swap`` and after enabling activation checkpointing, which is compiled along
    with the blocks, and before ``fully_shard`` or DDP, whose hooks must stay outside the graphs.

    Args:
        model: a Transformers model or a user's own.
        dynamic: whether to use one graph for all batch lengths. If False, which is torch's default, the first
            length has its own graph, and all other lengths share a second one.

    Raises:
        UsageError: there is no C++ compiler, which inductor requires on a CPU, or inductor's cache is not
            writable, not private or mounted noexec.
    """
    need_compiler("cpu" if all(p.device.type == "cpu" for p in model.parameters()) else "cuda")
    graph_cache.require_executable(graph_cache.claim())
    if hasattr(torch._inductor.config, "cpp_cache_precompile_headers"):  # as claimed, if that came too late
        torch._inductor.config.cpp_cache_precompile_headers = False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS_OF_A_BLOCK)
    # Backward is called outside of autocast: what forward took out of it (fp32) would be in it again.
    if hasattr(torch._functorch.config, "backward_pass_autocast"):  # of newer torch
        torch._functorch.config.backward_pass_autocast = "off"
    blocks = repeated_blocks(model)
    options = {"fallback_random": True} if devices.current().is_host else None
    for _, block in blocks or [("", model)]:
        _compile(block, dynamic or None, options)  # None: only what differs between batches
    what = f"{len(blocks)} blocks, which share one graph," if blocks else "the whole model"
    lengths = (
        "for all batch lengths" if dynamic else "once for the first batch length and once for all others"
    )
    return f"graphs: torch.compile compiles {what} {lengths}"


def _compile(block: nn.Module, dynamic: bool | None, options: dict[str, Any] | None) -> None:
    """Compile ``block`` in place, also if its class is one of torch's own, such as ``nn.Sequential``.

    Dynamo (torch 2.13) skips the frames of torch's own files, so ``nn.Module.compile`` of such a module does
    nothing, silently. ``torch.compile(module)`` wraps the call in the same way as is done here.
    """
    from torch._dynamo import external_utils, trace_rules

    call: Any = block._call_impl
    if trace_rules.check(block.forward):
        call = external_utils.wrap_inline(call)
    block._compiled_call_impl = torch.compile(call, dynamic=dynamic, options=options)


def attention_outside(model: nn.Module) -> str:
    """Return a log line if attention is not part of the compiled graphs, otherwise an empty string.

    The CPU operation generates dropout masks tile by tile from its own generator, which a graph cannot
    capture; torch's own attention would be part of the graph but compute all scores. Each block then consists
    of two graphs, before and after its attention.
    """
    configs = [vars(part).get("config") for part in model.modules()]
    drops = any(getattr(config, name, 0.0) for config in configs if config for name in _ATTENTION_DROPOUTS)
    if not drops or not devices.current().is_host:
        return ""
    return "graphs: attention is not compiled, because its dropout masks are generated tile by tile"


def count_graphs() -> int:
    """Return the number of graphs that this process has compiled.

    The number must not grow with the number of steps.
    """
    counters: Any = torch._dynamo.utils.counters
    return int(counters["stats"]["unique_graphs"])
