"""The comparison with MindSpeed has each of its features, once, and says of each what is here."""

from __future__ import annotations

import pytest

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
