"""Calibrate time estimates with a table that ``bench`` has measured on the job's devices."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_npu.base import given_files
from megatron_npu.base.errors import UsageError
from megatron_npu.planning.estimate import Estimate
from megatron_npu.planning.hardware import Hardware
from megatron_npu.planning.layouts import Layout
from megatron_npu.planning.shape import Shape

_REMEDY = "Run `megatron-npu bench --suite 3d --json FILE` on the job's devices."


@dataclass(frozen=True)
class Calibration:
    """The ratios of measured times to estimated times.

    Attributes:
        factor: the median ratio.
        least, most: the smallest and the largest ratio.
        rows: the number of rows that were compared.
        source: the path of the table, and the devices that the table names.
    """

    factor: float = 1.0
    least: float = 1.0
    most: float = 1.0
    rows: int = 0
    source: str = ""

    @classmethod
    def of(cls, path: Path, device: str, hardware: Hardware, per_node: int) -> Calibration:
        """Compare the measured rows of a table with the estimates for them.

        Raises:
            UsageError: the file is not a table from ``bench --suite 3d``, or has no times for this kind of
                device.
        """
        try:
            table = json.loads(given_files.text(path))
            measured = table["device"]
            if measured != device:
                raise UsageError(
                    f"--bench {path} was measured on {measured}, but the plan is for {device}",
                    remedy=_REMEDY,
                )
            found = [seconds / one.time().total for one, seconds in _rows(table, hardware, per_node)]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            told = f"--bench {path} is not a JSON file written by `bench --suite 3d`: {error!r:.200}"
            raise UsageError(told, remedy=_REMEDY) from None
        if not found:
            raise UsageError(
                f"--bench {path} must contain measured times, but none of its rows has a time", remedy=_REMEDY
            )
        source = f"{path.name}, {table.get('hardware') or device}"
        return cls(statistics.median(found), min(found), max(found), len(found), source)

    def line(self) -> str:
        """Return a line that describes the calibration."""
        if not self.rows:
            return (
                "not calibrated on hardware (to calibrate, pass --bench FILE with a table from `bench "
                "--suite 3d`)"
            )
        return (
            f"times {self.factor:.3g}, the median of {self.rows} measured rows of {self.source} "
            f"({self.least:.3g} to {self.most:.3g})"
        )


def _rows(table: dict[str, Any], hardware: Hardware, per_node: int) -> Iterator[tuple[Estimate, float]]:
    """Yield, for each measured row, the estimated and the measured seconds per iteration."""
    model, batch = table["model"], table["global_batch_size"]
    hidden, heads = model["hidden"], model["heads"]
    shape = Shape(
        layers=model["layers"],
        hidden=hidden,
        heads=heads,
        groups=heads,
        channels=hidden // heads,
        ffn=4 * hidden,
        matrices=2,
        vocabulary=model["vocabulary"],
        tied=True,
        length=model["seq_length"],
        experts=0,
        chosen=1,
    )
    for row in table["rows"]:
        if not row.get("samples_per_second"):
            continue
        tensor, pipeline = int(row["tensor parallel"]), int(row["pipeline parallel"])
        data, micro = table["devices"] // (tensor * pipeline), table["micro_batch_size"]
        sizes = (tensor, pipeline, 1, 1, 1, data, micro, batch // (micro * data))
        layout = Layout(*sizes, recomputed="none", shared=False)
        yield Estimate(shape, layout, hardware, per_node), batch / row["samples_per_second"]
