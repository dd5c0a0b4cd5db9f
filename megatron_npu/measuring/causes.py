"""Explain why a row of results differs from the published trend on this machine or for this model size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_npu.measuring import estimate
from megatron_npu.measuring.plan import Plan
from megatron_npu.measuring.schemes import Scheme

AS_THERE, OTHERWISE, UNDECIDED = "as in the document", "not as in the document", "about the same"
_THEIRS = "this machine does not have the document's 4 GPUs of 32 GB"


def why(plan: Plan, scheme: Scheme, verdicts: Mapping[str, str]) -> str:
    """Return the reasons why a measured row differs from the published trend, or an empty string.

    Args:
        plan: the table's plan.
        scheme: the row's scheme.
        verdicts: the verdicts on ``peak`` and ``throughput``, where the document has values; each is either
            ``AS_THERE`` or another verdict.
    """
    if scheme.printed.word == "OOM":
        return _no_oom(plan, scheme)
    parts = []
    for name, reasons in (("peak", _of_peak), ("throughput", _of_throughput)):
        verdict = verdicts.get(name, AS_THERE)
        if verdict != AS_THERE:
            found = [*reasons(plan, scheme, verdict)] or [_THEIRS]
            parts.append(f"{name}: {', and '.join(found)}")
    return "; ".join(parts)


def _no_oom(plan: Plan, scheme: Scheme) -> str:
    needed = estimate.bytes_of_a_rank(
        plan.job(scheme), plan.suite.family, host_is_device=plan.machine.host_memory
    )
    return (
        f"no OOM here: the memory that a rank needs, an estimated {needed >> 20} MB or more, is available; "
        "with a lower --memory-limit it runs out of memory as in the document"
    )


def _of_peak(plan: Plan, scheme: Scheme, verdict: str) -> Iterator[str]:
    if scheme.mixed and scheme.sharding == "none" and plan.suite.workload.startswith("huggingface:"):
        job = plan.job(scheme)
        copies = 2 * estimate.parameters(plan.suite.family, plan.size)
        yield (
            f"during a step, autocast stores 16-bit copies of the weights ({copies >> 20} MB) and halves "
            f"the activations, of which at least {estimate.activations(job) >> 20} MB remain"
        )
    if plan.machine.is_host:
        yield (
            "the resident set includes memory that malloc and gloo keep (a simulated or real NPU is "
            "measured exactly)"
        )
    yield from _size(plan)


def _of_throughput(plan: Plan, scheme: Scheme, verdict: str) -> Iterator[str]:
    if verdict == UNDECIDED:
        yield (
            "repetitions differ from each other by more than the two rows do: raise --steps or --repeat, or "
            "use an idle machine"
        )
        return
    if plan.machine.is_host and plan.ranks > 1:
        yield (
            f"{plan.ranks} ranks share {plan.machine.cores} cores and one memory, which shows neither "
            "the gain of several devices nor the cost of links between them"
        )
    if scheme.mixed and plan.machine.lacks(plan.mixed_precision):
        yield f"{plan.mixed_precision} is emulated by this processor"
    if scheme.graph:
        yield "graphs are compiled by torch's inductor here, but by ONNX Runtime on GPUs in the document"
    yield from _size(plan)


def _size(plan: Plan) -> Iterator[str]:
    """Yield the size of the document's model if the measured model has a different size."""
    theirs, ours = plan.suite.family.size(plan.suite.family.documented), plan.size
    batch = plan.suite.micro_batch_size
    if (ours.layers, ours.hidden, ours.seq_length) != (theirs.layers, theirs.hidden, theirs.seq_length) or (
        plan.micro_batch_size != batch
    ):
        yield (
            f"the document's model has {theirs.layers} layers x {theirs.hidden} channels, "
            f"{theirs.seq_length} tokens, micro batch {batch}"
        )
