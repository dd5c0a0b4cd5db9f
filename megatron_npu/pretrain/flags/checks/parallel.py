"""Check the parallel layout of a run."""

from __future__ import annotations

import math
from argparse import Namespace

from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.options import hccl_buffers
from megatron_npu.pretrain.flags import derive
from megatron_npu.pretrain.flags.checks import divides


def check(args: Namespace) -> None:
    """Check that the model can be partitioned according to the parallel sizes.

    Raises:
        UsageError: a size is not divisible by another size, or a flag requires another flag.
    """
    together = derive.model_parallel_size(args)
    divides(
        together,
        "tensor x pipeline x context parallel sizes",
        args.world_size,
        "the number of processes",
        f"Start a multiple of {together} processes, such as `torchrun --nproc-per-node {together} "
        "-m megatron_npu pretrain …`, or change the sizes.",
    )
    derive.layout(args)
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    divides(tensor, "--tensor-model-parallel-size", args.num_attention_heads, "--num-attention-heads")
    divides(tensor, "--tensor-model-parallel-size", args.num_query_groups, "--num-query-groups")
    divides(tensor, "--tensor-model-parallel-size", args.ffn_hidden_size, "--ffn-hidden-size")
    divides(pipeline, "--pipeline-model-parallel-size", args.num_layers, "--num-layers")
    _sequence(args)
    _interleaving(args)
    _hierarchy(args)
    if args.tp_comm_overlap and devices.current().name != "npu":  # of an NPU the configuration says what fits
        raise UsageError(
            f"--tp-comm-overlap requires an Ascend NPU, but the device is {devices.current().name}; on "
            "other devices only TransformerEngine's layers support this flag, and this command does not "
            "use them",
            remedy="Remove it; --sequence-parallel works without it.",
        )
    hccl_buffers.choose(args)
    if args.check_weight_hash_across_dp_replicas_interval and args.fully_sharded:
        raise UsageError(
            "--check-weight-hash-across-dp-replicas-interval cannot be used with FSDP "
            f"({args.fully_sharded}), because each rank then has a different part of every weight and "
            "there are no replicas to compare",
            remedy="Remove it, or use the distributed optimizer.",
        )
    if args.overlap_param_gather and not (args.use_distributed_optimizer and args.overlap_grad_reduce):
        raise UsageError(
            "--overlap-param-gather requires --use-distributed-optimizer and --overlap-grad-reduce",
            remedy="Add the missing flags.",
        )


def _sequence(args: Namespace) -> None:
    factors: dict[str, int] = {}  # those that count here, by what they are
    if args.context_parallel_size > 1:  # each rank has two chunks, see megatron.core.utils
        factors["2 x --context-parallel-size"] = 2 * args.context_parallel_size
    if args.sequence_parallel:
        factors["--tensor-model-parallel-size (with --sequence-parallel)"] = args.tensor_model_parallel_size
    divides(math.prod(factors.values()), " x ".join(factors), args.seq_length, "--seq-length")


def _hierarchy(args: Namespace) -> None:
    sizes, ring = args.hierarchical_context_parallel_sizes, args.cp_comm_type == "a2a+p2p"
    if ring != (sizes is not None):
        raise UsageError(
            "--cp-comm-type a2a+p2p and --hierarchical-context-parallel-sizes must be passed together, "
            "but only one of them was given",
            remedy="Add the other flag.",
        )
    if sizes is not None and (len(sizes) != 2 or math.prod(sizes) != args.context_parallel_size):
        raise UsageError(
            "--hierarchical-context-parallel-sizes must be two sizes (nearby ranks, distant ranks) whose "
            f"product is --context-parallel-size {args.context_parallel_size}, but got "
            f"{' '.join(map(str, sizes))}",
            remedy="Change one of the two.",
        )


def _cuts_stages(args: Namespace, flag: str, size: int) -> None:
    if args.pipeline_model_parallel_size == 1:
        raise UsageError(
            f"{flag} requires a --pipeline-model-parallel-size of at least 2",
            remedy="Raise --pipeline-model-parallel-size, or remove this flag.",
        )
    stage = args.num_layers // args.pipeline_model_parallel_size
    divides(size, flag, stage, "the number of layers of a pipeline stage")


def _interleaving(args: Namespace) -> None:
    layers, chunks = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    if layers is not None and chunks is not None:
        raise UsageError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank are "
            "mutually exclusive",
            remedy="Remove one of them.",
        )
    for flag, size in (
        ("--num-layers-per-virtual-pipeline-stage", layers),
        ("--num-virtual-stages-per-pipeline-rank", chunks),
    ):
        if size is not None:
            _cuts_stages(args, flag, size)
    derive.interleaving(args)
    interleaved = args.virtual_pipeline_model_parallel_size is not None
    if interleaved and args.pipeline_model_parallel_size == 2 and not args.overlap_p2p_comm:
        raise UsageError(
            "an interleaved pipeline with 2 stages cannot be used with --no-overlap-p2p-communication, "
            "because batched sends of two chunks to the same neighbor cannot be told apart",
            remedy="Remove --no-overlap-p2p-communication.",
        )


def batches(args: Namespace) -> None:
    """Check that the global batch size is a multiple of the micro-batch size times the data-parallel size.

    Raises:
        UsageError: it is not a multiple.
    """
    derive.global_batch_size(args)
    _ramp(args)
    whole = args.micro_batch_size * args.data_parallel_size
    sizes = _sizes(args)
    for flag, size in sizes.items():
        divides(whole, "micro batch size x data-parallel size", size, flag)
    derive.micro_batches(args)
    if args.virtual_pipeline_model_parallel_size is not None:
        for flag, size in sizes.items():
            divides(
                args.pipeline_model_parallel_size,
                "the pipeline stages, as interleaving requires",
                size // whole,
                "the number of micro batches" + f" of {flag} {size}" * (len(sizes) > 1),
            )


def _sizes(args: Namespace) -> dict[str, int]:
    """Return the final global batch size, and the start and increment of its ramp, each with a
    description.
    """
    ramp = args.rampup_batch_size
    steps = {"the start of --rampup-batch-size": ramp[0], "its increment": ramp[1]} if ramp else {}
    return {"--global-batch-size": args.global_batch_size, **steps}


def _ramp(args: Namespace) -> None:
    """Check that the increments of a batch-size ramp lead exactly from its start to its end."""
    if args.rampup_batch_size is None:
        return
    start, increment, _ = args.rampup_batch_size
    given = f"--rampup-batch-size {' '.join(map(str, args.rampup_batch_size))}"
    if args.train_samples is None:
        raise UsageError(
            f"{given} requires --train-samples, because the ramp is measured in samples",
            remedy="Pass --train-samples instead of --train-iters or --epochs.",
        )
    if start >= args.global_batch_size or (args.global_batch_size - start) % increment:
        raise UsageError(
            f"{given} must start below --global-batch-size {args.global_batch_size} and reach it in a "
            "whole number of increments",
            remedy="Change one of the two flags.",
        )
