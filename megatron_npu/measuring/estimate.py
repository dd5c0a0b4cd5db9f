"""Estimate the minimum memory of a rank before a row starts, so that the machine does not run out of memory.

The estimate is a calculated lower bound. A row whose bound exceeds the limit cannot fit, and other rows may
still run out of memory (OOM).
"""

from __future__ import annotations

from megatron_npu.measuring.job import Job
from megatron_npu.measuring.sizes import Family, layer_parameters, parameters
from megatron_npu.options.switches import FULLY

_WEIGHTS_TOO = ("zero-3", "fsdp")


def bytes_of_a_rank(job: Job, family: Family, *, host_is_device: bool) -> int:
    """Return a lower bound, in bytes, for the model states and activations on the rank that needs the most
    memory.

    Args:
        job: the row's job.
        family: the model's family.
        host_is_device: whether offloaded data stays in the same memory.
    """
    return states(job, family, host_is_device) + activations(job)


def states(job: Job, family: Family, host_is_device: bool) -> int:
    """Return the number of bytes of weights, gradients and optimizer states, counted as in ZeRO
    (arXiv:1910.02054).
    """
    scheme, count = job.scheme, parameters(family, job.size)
    if job.workload.startswith("megatron:"):
        # the first and the last stage hold the embedding
        layers = layer_parameters(job.size)
        count = (layers // scheme.pipeline + (count - layers)) // scheme.tensor
    weights, gradients, optimizer = _bytes_of_a_weight(job)
    shared = job.data_parallel_size
    if scheme.sharding != "none":
        optimizer /= shared
    if scheme.sharding in FULLY:
        gradients /= shared
    if scheme.sharding in _WEIGHTS_TOO:
        weights /= shared
    if scheme.offload and not host_is_device:
        optimizer = 0.0
    return int(count * (weights + gradients + optimizer))


def _bytes_of_a_weight(job: Job) -> tuple[float, float, float]:
    """Return the number of bytes per parameter for the weight, the gradient and the optimizer state without
    sharding.

    With mixed precision, Megatron's model has weights of 2 bytes, gradients of 4 (bf16) or 2 (fp16), and 12
    in the optimizer. With autocast (Transformers), weights stay fp32: 4 + 4 + 8 bytes.
    """
    if not (job.scheme.mixed and job.workload.startswith("megatron:")):
        return 4.0, 4.0, 8.0
    # torch's FSDP has gradients in the weights' precision
    short = job.mixed_precision == "fp16" or job.scheme.sharding == "fsdp"
    return 2.0, 2.0 if short else 4.0, 12.0


def activations(job: Job) -> int:
    """Return the number of bytes that are saved for the backward pass with fused attention.

    These bytes include at least the logits.

    According to arXiv:2205.05198, equations 1 and 2, these are s b h (10 + 24 / t) per layer in 16 bits,
    without the term 5 a s / h; the first pipeline stage stores as many micro batches as there are stages.
    """
    size, scheme = job.size, job.scheme
    tokens = job.micro_batch_size * size.seq_length
    layer = tokens * size.hidden * (10 + 24 / scheme.tensor) * (1 if scheme.mixed else 2)
    in_flight = min(scheme.pipeline, job.micro_batches)
    logits = tokens * size.vocabulary * 4 / scheme.tensor if "finetuning" not in job.workload else 0
    return int(max(layer * size.layers / scheme.pipeline * in_flight, logits))
