"""The training job of one row, as the parent writes it and each rank reads it."""

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
    """What all rows of a table have in common.

    Attributes:
        size: of the model.
        ranks: processes, one for each device.
        micro_batch_size, global_batch_size: samples of one forward pass on one rank; of one step on all.
        steps, repeat: so many steps are timed together, so many times.
        mixed_precision: what "mixed" means, ``bf16`` or ``fp16``.
        seed: of weights, tokens and dropout.
        memory_limit: bytes that a rank may have; None: what the device has.
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
        """Return these values by their names."""
        return {field.name: getattr(self, field.name) for field in fields(Setting)}


@dataclass(frozen=True, kw_only=True)
class Job(Setting):
    """One row of a table, on this machine.

    Attributes:
        workload: as in ``Suite``.
        scheme: of the row.
    """

    workload: str
    scheme: Scheme

    @property
    def steps_in_all(self) -> int:
        """The steps of a rank, those of warming up among them."""
        return WARM_UP + self.steps * self.repeat

    @property
    def data_parallel_size(self) -> int:
        """The ranks that train on samples of their own."""
        return self.ranks // (self.scheme.tensor * self.scheme.pipeline)

    @property
    def micro_batches(self) -> int:
        """The micro batches of one rank in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    @property
    def switches(self) -> Switches:
        """The words of ``megatron-npu train`` that the row stands for."""
        return Switches(
            mixed_precision=self.mixed_precision if self.scheme.mixed else None,
            sharding=self.scheme.sharding,
            cpu_offload=self.scheme.offload,
            graph_optimization=self.scheme.graph,
        )

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return what ``to_json`` wrote."""
        values = json.loads(text)
        scheme = values["scheme"]
        scheme |= {"cells": tuple(scheme["cells"]), "printed": Printed(**scheme["printed"])}
        return cls(**values | {"scheme": Scheme(**scheme), "size": Size(**values["size"])})
