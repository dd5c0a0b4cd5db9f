"""Command-line words for layouts and models, shared by small training runs that add their own sizes."""

from __future__ import annotations

TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
CP2 = "--context-parallel-size 2 --attention-dropout 0"
EP2 = "--expert-model-parallel-size 2"
SHARED = "--use-distributed-optimizer"
SEQUENCE = f"{TP2} --sequence-parallel"
INTERLEAVED = f"{PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
GATED = "--swiglu --normalization RMSNorm --disable-bias-linear"
# a Llama of small groups, for four or eight heads
LLAMA = (
    f"--bf16 {GATED} --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--group-query-attention --num-query-groups"
)
# tokens per expert decide about shapes; a capacity makes them known where nobody has computed the router
FREE_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
EXPERTS = f"{FREE_EXPERTS} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
