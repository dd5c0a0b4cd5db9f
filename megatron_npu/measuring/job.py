"""Describe the training job for one row of a table, which the parent process writes and each rank reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron_npu.measuring.schemes import Printed, Scheme
from megatron_npu.measuring.sizes import Size
from megatron_npu.options.switches import Switches

WARM_UP = 3  # steps before the first that counts: optimizer states, graphs, allocators


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings that all rows of a table share.

    Attributes:
        size: the model's size.
        ranks: the number of processes, one per device.
        micro_batch_size, global_batch_size: the number of samples per forward pass of a rank, and per step of
            all ranks.
        steps, repeat: the number of steps that are timed together, and the number of repetitions.
        mixed_precision: the dtype of the mixed-precision rows, ``bf16`` or ``fp16``.
        seed: the random seed for weights, tokens and dropout.
        memory_limit: the maximum number of bytes per rank. If None, it is the memory of the device.
    """

    size: Size
    ranks: int
    micro_batch_size: int
    global_batch_size: int
    steps: int
    repeat: int
    mixed_precision: str = "bf16"
    seed: int = 1234
    memory_limit: int | None = None

    def setting(self) -> dict[str, Any]:
        """Return the settings as a dict, keyed by name."""
        return {field.name: getattr(self, field.name) for field in fields(Setting)}


@dataclass(frozen=True, kw_only=True)
class Job(Setting):
    """The training job for one row of a table, to be measured on this machine.

    Attributes:
        workload: see ``Suite``.
        scheme: the scheme that this row measures.
    """

    workload: str
    scheme: Scheme

    @property
    def steps_in_all(self) -> int:
        """The number of steps of each rank, including the warm-up."""
        return WARM_UP + self.steps * self.repeat

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that train on different samples."""
        return self.ranks // (self.scheme.tensor * self.scheme.pipeline)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches per rank and step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    @property
    def switches(self) -> Switches:
        """The switches of ``megatron-npu train`` that the row uses."""
        return Switches(
            mixed_precision=self.mixed_precision if self.scheme.mixed else None,
            sharding=self.scheme.sharding,
            cpu_offload=self.scheme.offload,
            graph_optimization=self.scheme.graph,
        )

    def to_json(self) -> str:
        """Convert the job to a JSON string."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Create a job from a string that ``to_json`` has returned."""
        values = json.loads(text)
        scheme = values["scheme"]
        scheme |= {"cells": tuple(scheme["cells"]), "printed": Printed(**scheme["printed"])}
        return cls(**values | {"scheme": Scheme(**scheme), "size": Size(**values["size"])})
