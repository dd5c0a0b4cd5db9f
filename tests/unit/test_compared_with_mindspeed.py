"""The comparison with MindSpeed has each of its features, once, and says of each what is here."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from megatron_npu.training.arguments import parser
from tests.end_to_end.tiny import ROOT

# As MindSpeed's documentation names them, in lower case: each a part of a row's first cell.
FEATURES = """
flash attention; masks in the kernel; sparse modes; documents (tnd); alibi; fusion v2; fused
rmsnorm; swiglu; rotary embedding; masked softmax; weight gradient into an fp32 buffer; fused adamw;
ring with balanced chunks; ulysses,; keys and values gathered; hybrid of ring and ulysses; double
ring; adaptive cp; cache of keys and values; unaligned cp; keys and values of ulysses gathered;
grouped products; fused permutation; fused router; dispatchers `allgather` and `alltoall`;
all-to-all overlapped; shared experts overlapped; zero-memory levels 0 and 1; tp-extend-ep; 1f1b
overlap; dualpipev; placement of experts; broadcast of hot ones; npu_alltoallv_gmm;
npu_gmm_alltoallv; --use-ascend-mc2; coc; --tp-2d; variants of vocabulary parallelism; unaligned
linear layers; --reuse-fp32-param; --swap-optimizer; --virtual-optimizer; swapped attention; smart
swap; recomputation of activation functions and norms; selective recomputation; ripipe;
--noop-layers; automatic pipelines, settings and parallelism; --hccl-group-buffer; order of kernels
and quality of service; hccl in place of gloo; asynchronous all-reduce of what is logged;
low-precision optimizer; lossless compression; fused ema adamw; muon; custom fsdp; layerzero; fsdp2;
profiler; data dumps; deterministic; rates by operation; comparison of precision online; last-gasp
checkpoints; uce; elastic training; replicas of the optimizer; mxfp8; hif8; qat, qad; lora; cclora;
sft packs; dpo; weights of transformers loaded online; over 100 models; evaluation suites;
chunkloss; attention sinks; softmax off by one; absorbed attention of mla; lightning indexer; glu
variants; rotary embedding with the split
"""
_FLAG = r"--[a-z][a-z0-9-]+"
NAMES = [" ".join(name.split()) for name in FEATURES.split(";")]


def rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "compared-with-mindspeed.md").read_text(encoding="utf-8").splitlines()
    tables = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")
    ]
    return [cells for cells in tables if cells[0] != "theirs" and not cells[0].startswith("---")]


@pytest.mark.parametrize("name", NAMES)
def test_each_feature_has_its_row(name: str) -> None:
    assert any(name in cells[0].lower() for cells in rows()), f"no row names {name!r}"


def test_each_row_says_what_is_here() -> None:
    """In the column after the claim, or after the name where a table has no claims."""
    for cells in rows():
        assert any(len(cell) > 7 for cell in cells[1:]), cells


def test_the_flags_that_the_driver_lacks_are_those_that_it_names() -> None:
    page = (ROOT / "docs" / "compared-with-mindspeed.md").read_text(encoding="utf-8")
    ours = {flag for action in parser()._actions for flag in action.option_strings}
    flags = {flag for cells in rows() for cell in cells[1:] for flag in re.findall(_FLAG, cell)}
    head = page[: page.index("## Optimizer")]
    assert {flag for flag in re.findall(_FLAG, head) if flag != "--cpu-offload"} == flags - ours


def results(name: str) -> dict[str, Any]:
    """Return ``benchmarks/results/NAME.json``."""
    text = (ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8")
    measured: dict[str, Any] = json.loads(text)
    return measured


def phrases() -> list[str]:
    """What the page says of what was measured, made from the files."""
    options = results("layer-options")["options"]
    moe = results("launches")["styles"]["moe"]
    optimizer = results("optimizer-memory")
    tensor_parallel = results("messages")["layouts"]["tp2"]
    loss = results("loss-npu")["steps"]

    def peak(option: str, way: str, digits: int = 1) -> str:
        return f"{options[option][way]['peak'] / 2**20:.{digits}f}"

    def launches(option: str) -> list[int]:
        return [options[option][way]["launches"] for way in ("without", "with")]

    def layer(way: str) -> str:
        count = moe[way]["forward_backward"] + moe[way]["optimizer"]
        return f"{count} and {moe[way]['activation_bytes'] / 2**20:.1f} MiB"

    def bytes_of(way: str) -> str:
        return f"{optimizer['optimizers'][way]['bytes_per_parameter']:.2f}"

    plain, fused = launches("router, softmax")
    with_loss, sigmoid = (
        launches("router, softmax, auxiliary loss"),
        launches("router, sigmoid, groups, bias"),
    )
    off_by_one, learnable = launches("softmax off by one"), launches("learnable sinks")
    whole, moved = launches("offload core_attn")
    redirected = optimizer["launches_by_layers"]["redirection"]
    return [
        f"{plain} launches without, {fused} with; with the auxiliary loss {with_loss[0]} and {with_loss[1]}",
        f"bias and scale, {sigmoid[0]} and {sigmoid[1]}",
        f"{off_by_one[0]} launches and {peak('softmax off by one', 'without')} MiB redirected",
        f"{off_by_one[1]} and {peak('softmax off by one', 'with')} MiB here",
        f"learnable {learnable[0]} and {learnable[1]}",
        *(
            f"`{name}` {peak(f'recompute {name}', 'without')} {middle}{peak(f'recompute {name}', 'with')}"
            for name, middle in (("mlp", "and "), ("moe_act", "and "), ("mla_up_proj", "and "))
        ),
        f"{whole} launches and a peak of {peak('offload core_attn', 'without')} MiB before, "
        f"{moved} and {peak('offload core_attn', 'with')} with",
        f"{layer('redirection').replace(' and', ' launches and')} redirected, {layer('project')} with",
        f"{bytes_of('fp32 main weights')} bytes a parameter before, {bytes_of('remainders')} after",
        f"{bytes_of('remainders, bf16 moments')} bytes a parameter, 64 launches",
        f"redirected {redirected['1']} launches with one layer, {redirected['2']} with two",
        f"{tensor_parallel['launches']} launches, {tensor_parallel['calls']} messages and "
        f"{tensor_parallel['bytes'] / 2**20:.1f} MiB",
        f"{loss['50304']['peak_of_logits']:.3f} of the peak at 50,304 words, "
        f"{loss['131072']['peak_of_logits']:.3f}",
    ]


def test_its_counts_are_those_that_were_measured() -> None:
    page = (ROOT / "docs" / "compared-with-mindspeed.md").read_text(encoding="utf-8")
    stale = [phrase for phrase in phrases() if phrase not in page]
    assert not stale, f"not in the page, of what was measured: {stale}"
