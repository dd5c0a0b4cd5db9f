"""Check combinations of acceleration switches, models and devices before any model is loaded.

``train`` and ``pretrain`` use these rules, and docs/reference/train-switches.md is generated from the tables
(scripts/switch_table.py).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.base.installed_packages import is_installed
from megatron_npu.options.switches import DOCUMENTED_GRAPH, FULLY, GRAPH, Switches

FAMILIES = {
    "transformers": "a Transformers model",
    "user": "a user's own model",
    "megatron": "a Megatron model",
}
DEVICES = ("cpu", "cuda", "npu")


@dataclass(frozen=True)
class Place:
    """The model and the device for which acceleration switches are checked.

    Attributes:
        family: one of ``FAMILIES``.
        device: one of ``DEVICES``.
        cut: whether the model is partitioned by tensor, pipeline or context parallelism.
        alone: whether there is only one data-parallel rank.
    """

    family: str
    device: str
    cut: bool = False
    alone: bool = False

    def in_effect(self, switches: Switches) -> Switches:
        """Return the switches with the sharding strategy that takes effect on this device.

        For a partitioned Megatron model, zero-2 becomes zero-1, because every micro batch of a pipeline
        accumulates into unsharded gradients. A single rank shards nothing.
        """
        if self.family != "megatron" or switches.sharding not in FULLY:
            return switches
        if self.cut:
            return replace(switches, sharding="zero-1") if switches.sharding == "zero-2" else switches
        return replace(switches, sharding="none") if self.alone else switches


@dataclass(frozen=True)
class Word:
    """A command-line switch, with the name of its implementation.

    Attributes:
        flag: the switch as typed.
        name: the field of ``Switches``.
        value: the value of that field.
        ours: its implementation for Transformers and user models, or None if it is not supported.
        megatron: its implementation for Megatron models, or None if it is not supported.
    """

    flag: str
    name: str
    value: Any
    ours: str | None
    megatron: str | None

    def given(self, switches: Switches) -> bool:
        """Return True if the switch is on."""
        value = getattr(switches, self.name)
        return bool(value) and (value == self.value or self.name == "lora_rank")


WORDS = (
    Word(
        "--mixed-precision bf16",
        "mixed_precision",
        "bf16",
        "autocast; sharded weights are gathered in bf16",
        "`--bf16`",
    ),
    Word(
        "--mixed-precision fp16", "mixed_precision", "fp16", "autocast in fp16, with loss scaling", "`--fp16`"
    ),
    Word(
        "--zero-1-memory-optimization",
        "sharding",
        "zero-1",
        "DDP; each rank updates its own rows of every weight",
        "`--use-distributed-optimizer`",
    ),
    Word(
        "--zero-2-memory-optimization",
        "sharding",
        "zero-2",
        "`fully_shard`; weights stay gathered from forward to backward",
        "Megatron's FSDP, `optim_grads`; with tensor or pipeline parallelism the distributed optimizer",
    ),
    Word(
        "--zero-3-memory-optimization",
        "sharding",
        "zero-3",
        "`fully_shard`, gathered block by block",
        "Megatron's FSDP, `optim_grads_params`",
    ),
    Word("--fsdp-memory-optimization", "sharding", "fsdp", "same as zero-3", "torch's `fully_shard`"),
    Word(
        "--cpu-offload",
        "cpu_offload",
        True,
        "`CPUOffloadPolicy`; with none or zero-1, the optimizer on the host",
        "`--optimizer-cpu-offload`",
    ),
    Word(
        "--checkpoint-activations",
        "checkpoint_activations",
        True,
        "non-reentrant checkpointing of blocks; Transformers' own switch",
        "`--recompute-granularity full`",
    ),
    Word(GRAPH, "graph_optimization", True, "`torch.compile` of each block", None),
    Word("--dynamic-shape", "dynamic_shape", True, "pads to a few lengths; `compile(dynamic=True)`", None),
    Word("--fused-ops", "fused_ops", True, "`megatron_npu.ops.swap`", "always on, through the plug-in"),
    Word("--lora-rank", "lora_rank", 8, "peft", None),
)


@dataclass(frozen=True)
class Refusal:
    """A rule that rejects a combination of switches.

    Attributes:
        switches: maps names to values; the rule applies if all of them are given.
        expected: what the switches require, with the reason.
        remedy: advice for the user.
        families, devices: where the rule applies.
        cut: whether the rule applies only to partitioned models.
    """

    switches: Mapping[str, tuple[Any, ...]]
    expected: str
    remedy: str
    families: tuple[str, ...] = tuple(FAMILIES)
    devices: tuple[str, ...] = DEVICES
    cut: bool = False

    def refuses(self, given: Switches, place: Place) -> bool:
        """Return True if the rule rejects the given switches."""
        switches = place.in_effect(given)
        return (
            place.family in self.families
            and place.device in self.devices
            and (place.cut or not self.cut)
            and all(
                bool(getattr(switches, name)) if True in values else getattr(switches, name) in values
                for name, values in self.switches.items()
            )
        )


_OURS = ("transformers", "user")
_MEGATRON = ("megatron",)
_ON = (True,)

REFUSALS = (
    Refusal(
        {"cpu_offload": _ON},
        "a device with its own memory",
        "Remove the switch: everything is already in host memory.",
        devices=("cpu",),
    ),
    Refusal(
        {"graph_optimization": _ON},
        "layers of plain torch, because Megatron's layers use this project's fused operations and "
        "collectives, which torch.compile cannot trace",
        "Remove the switch: the fused operations serve the same purpose.",
        families=_MEGATRON,
    ),
    Refusal(
        {"graph_optimization": _ON},
        "a device for which torch's inductor has kernels: a CPU or CUDA",
        "Use --fused-ops instead, which has kernels for NPUs.",
        families=_OURS,
        devices=("npu",),
    ),
    Refusal(
        {"dynamic_shape": _ON},
        "batches of different lengths, because every sequence of a .bin/.idx dataset has --seq-length tokens",
        "Remove the switch.",
        families=_MEGATRON,
    ),
    Refusal(
        {"lora_rank": _ON},
        "a Transformers model, because adapters for Megatron's parallel layers are not supported",
        "Run `megatron-npu convert --to hf`, then `megatron-npu train --lora-rank`.",
        families=_MEGATRON,
    ),
    Refusal(
        {"sharding": ("zero-3", "fsdp")},
        "data parallelism only, because weights are gathered before use",
        "Use --zero-1-memory-optimization or --zero-2-memory-optimization, or remove the other sizes.",
        families=_MEGATRON,
        cut=True,
    ),
    Refusal(
        {"mixed_precision": ("fp16",), "sharding": ("zero-2", "zero-3")},
        "bf16 or fp32, because megatron-core 0.16 cannot unscale gradients if a rank has no shard of a "
        "weight",
        "Use bf16, or --zero-1-memory-optimization.",
        families=_MEGATRON,
    ),
    Refusal(
        {"mixed_precision": ("fp16",), "sharding": ("fsdp",)},
        "bf16 or fp32, because megatron-core does not scale losses under torch's FSDP",
        "Use bf16, or --zero-1-memory-optimization.",
        families=_MEGATRON,
    ),
    Refusal(
        {"cpu_offload": _ON, "sharding": FULLY},
        "that only the optimizer is offloaded, because megatron-core's FSDP does not support offloading",
        "Use --zero-1-memory-optimization.",
        families=_MEGATRON,
    ),
    Refusal(
        {"cpu_offload": _ON, "mixed_precision": (None,)},
        "16-bit weights, whose fp32 copies are moved to the host",
        "Add --mixed-precision.",
        families=_MEGATRON,
    ),
)


def meant(switches: Switches, place: Place) -> tuple[Switches, str]:
    """Return the switches that take effect, and a log line if one of them replaces another.

    The document uses ``--onnx-runtime-training`` for graphs to increase the speed. Where torch.compile has no
    kernels, the flag selects the fused operations instead.
    """
    if not switches.graph_optimization or switches.graph_word != DOCUMENTED_GRAPH:
        return switches, ""
    without = replace(switches, graph_optimization=False)
    if place.family == "megatron":
        return (
            without,
            f"{DOCUMENTED_GRAPH} has no effect, because Megatron's layers already use fused operations",
        )
    if place.device == "npu":
        why = "torch.compile has kernels only for CPUs and CUDA, and these operations use the NPU's own"
        return replace(without, fused_ops=True), f"{DOCUMENTED_GRAPH} means --fused-ops on an NPU: {why}"
    return switches, ""


def refuse(switches: Switches, place: Place) -> None:
    """Check that the given switches can be combined.

    Raises:
        UsageError: the switches cannot be combined, or a required package is not installed.
    """
    refusal = refusal_of(switches, place)
    if refusal is not None:
        words = _given(refusal, switches, place)
        raise UsageError(f"{words} is not supported; it requires {refusal.expected}", remedy=refusal.remedy)
    if switches.graph_optimization:
        need_compiler(place.device, switches.graph_word)
    if switches.lora_rank and not is_installed("peft"):
        raise UsageError(
            f"--lora-rank {switches.lora_rank} requires the peft package, which is not installed",
            remedy="Install it: pip install peft.",
        )


def refusal_of(switches: Switches, place: Place) -> Refusal | None:
    """Return the first rule that rejects the given switches, or None."""
    return next((rule for rule in REFUSALS if rule.refuses(switches, place)), None)


def _given(refusal: Refusal, switches: Switches, place: Place) -> str:
    """Describe the switches, among those that are given, that a rule rejects."""
    flags = [
        switches.graph_word if word.flag == GRAPH else word.flag
        for word in WORDS
        if word.name in refusal.switches and word.given(switches) and word.name != "mixed_precision"
    ]
    words = " with ".join(flags)
    if "mixed_precision" in refusal.switches:  # --fp16 says it as well
        words += f" in {switches.mixed_precision or 'fp32'}"
    if refusal.cut:
        words += " with tensor, pipeline or context parallelism"
    if refusal.devices != DEVICES:
        words += f" on the {place.device} device"
    if refusal.families != tuple(FAMILIES):
        words += f" for {FAMILIES[place.family]}"
    return words


def need_compiler(device: str, word: str = GRAPH) -> None:
    """Check that graphs can be compiled, which requires a compiler if the device is a CPU.

    Args:
        device: the device of the run.
        word: the switch that requests graphs.

    Raises:
        UsageError: there is no C++ compiler of the name that torch looks for.
    """
    usual = "clang++" if sys.platform == "darwin" else "g++"
    name = os.environ.get("CXX", usual)  # as in torch._inductor.config; if it is set, torch tries no other
    if device == "cpu" and not shutil.which(name):
        is_set = "CXX" in os.environ
        raise UsageError(
            f"on a CPU, {word} requires a C++ compiler, because torch.compile generates C++ code there, but "
            f"there is no {f'CXX={name}' if is_set else name}",
            remedy=f"{'Correct or unset CXX' if is_set else f'Install {name} (apt-get install g++)'}, or "
            "remove the switch.",
        )
