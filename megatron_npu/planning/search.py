"""Search for the best layout of a job: list the layouts, filter them by estimates, and dry-run the best
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.planning import layouts
from megatron_npu.planning.calibration import Calibration
from megatron_npu.planning.estimate import Estimate, Time
from megatron_npu.planning.hardware import HARDWARE
from megatron_npu.planning.job import Job
from megatron_npu.planning.layouts import Layout
from megatron_npu.planning.pipeline import Order
from megatron_npu.planning.report import size_text
from megatron_npu.planning.shape import Shape

_MARGIN = 1.15  # closed forms are wrong by some per cent: what they say is a little too large is run


@dataclass(frozen=True)
class DryRun:
    """The result of the dry run of a layout.

    Attributes:
        needed: the bytes that its largest rank needs; None if it did not train.
        why: the reason why it did not train.
        orders: the passes of each pipeline stage in the order in which it ran them. None if they were not
            recorded.
    """

    needed: int | None
    why: str = ""
    orders: tuple[Order, ...] | None = None


@dataclass(frozen=True)
class Found:
    """A layout that has been dry-run."""

    estimate: Estimate
    ran: DryRun

    @property
    def time(self) -> Time:
        return self.estimate.time(self.ran.orders)

    @property
    def wait_is_formula(self) -> bool:
        """True if the layout uses pipeline stages but the order of their passes is unknown."""
        return self.estimate.layout.pipeline > 1 and not self.time.recorded


@dataclass(frozen=True)
class Search:
    """The parameters of a search for layouts.

    Attributes:
        memory: the number of bytes per device.
        per_node: the number of devices per machine.
        hardware: the name of the device type for time estimates.
        runs: the maximum number of layouts to dry-run.
        calibration: the measured-to-estimated ratios by which estimates are multiplied.
    """

    job: Job
    memory: int
    per_node: int
    hardware: str
    runs: int
    calibration: Calibration = field(default_factory=Calibration)

    def candidates(self) -> tuple[list[Estimate], int]:
        """Return the layouts that may fit, fastest by estimate first, and the number of all layouts.

        Raises:
            UsageError: no layout divides evenly, or the command line lacks the model's sizes.
        """
        shape, hardware = Shape.of(self.job), HARDWARE[self.hardware]
        listed = [
            Estimate(shape, layout, hardware, self.per_node)
            for layout in layouts.all_of(self.job, shape, self.per_node)
        ]
        if not listed:
            raise UsageError(
                f"--search found no layout for {self.job.devices} devices; the parallel sizes must divide "
                "the numbers of layers and heads, and --global-batch-size",
                remedy="Change --devices or --global-batch-size.",
            )
        kept = _not_beaten(each for each in listed if each.memory() <= self.memory * _MARGIN)
        return sorted(kept, key=lambda each: each.time().total), len(listed)

    def run(self, dry_run: Callable[[Job], DryRun]) -> tuple[list[Found], list[str]]:
        """Return the layouts that were dry-run, with the fastest that fits first, and the lines to print."""
        kept, count = self.candidates()
        left: list[Estimate] = list(kept)
        found: list[Found] = []
        while left and len(found) < self.runs:
            each = left.pop(self._next(left, found))
            found.append(Found(each, dry_run(each.layout.job(self.job, each.shape))))
        found.sort(key=lambda each: (not self.fits(each), each.time.total))
        return found, self._lines(found, len(kept), count)

    def _next(self, left: list[Estimate], found: list[Found]) -> int:
        """Return the index of the fastest layout that may still fit, or else of the layout that needs the
        least memory.

        Closed forms do not count communication buffers: what the dry runs needed above their estimates, the
        others are expected to need, too.
        """
        above = [each.ran.needed - each.estimate.memory() for each in found if each.ran.needed is not None]
        most = self.memory - min(above) if above else self.memory * _MARGIN
        memory = [each.memory() for each in left]
        return next((at for at, size in enumerate(memory) if size <= most), memory.index(min(memory)))

    def fits(self, found: Found) -> bool:
        """Return True if a layout was able to train within the memory limit."""
        return found.ran.needed is not None and found.ran.needed <= self.memory

    def to_json(self, found: Iterable[Found]) -> dict[str, Any]:
        """Return the dry-run layouts as values for JSON, with sizes in bytes and times in seconds."""
        return {
            "devices": self.job.devices,
            "memory": self.memory,
            "hardware": self.hardware,
            "calibration": {"factor": self.calibration.factor, "source": self.calibration.line()},
            "layouts": [
                {
                    **asdict(each.estimate.layout),
                    "flags": each.estimate.layout.flags(each.estimate.shape),
                    "needed": each.ran.needed,
                    "fits": self.fits(each),
                    "error": each.ran.why or None,
                    "estimate": {
                        name: getattr(each.time, name) * self.calibration.factor
                        for name in ("total", "computing", "sending", "waiting", "updating")
                    },
                    "waiting_from": "formula" if each.wait_is_formula else "recorded order",
                    "orders": each.ran.orders,
                }
                for each in found
            ],
        }

    def _lines(self, found: list[Found], kept: int, count: int) -> list[str]:
        said = [
            (
                f"{count} layouts are possible, {kept} may fit by estimate, {len(found)} were dry-run (the "
                "fastest by estimate that may still fit; --search-runs)"
            ),
            "",
            f"{'TP':>4}{'PP':>4}{'VP':>4}{'CP':>4}{'EP':>4}{'DP':>6}{'micro':>7}{'recompute':>11}{'shared':>8}"
            f"{'memory':>12}{'estimate':>10}{'compute':>9}{'wait':>6}{'send':>6}",
        ]
        said += [self._line(each) for each in found]
        said += [
            "",
            "memory: the larger of the first and last stage in the dry run, with communication buffers; a "
            f"device has {size_text(self.memory)}. estimate: seconds per iteration on {self.hardware} by a "
            f"roofline model; {self.calibration.line()}",
            "wait: the average idle time of a stage, from the order of passes that the dry run recorded"
            + "; *: no order was recorded, from the formula (PP - 1) / (micro batches x VP)"
            * any(each.wait_is_formula for each in found),
        ]
        best = next((each for each in found if self.fits(each)), None)
        if best is None and kept > len(found):
            rest = f"{kept - len(found)} more may fit by estimate (raise --search-runs)"
            return [*said, f"none of these layouts fits; {rest}"]
        if best is None:
            return [*said, "no layout fits"]
        return [*said, f"fastest that fits: {' '.join(best.estimate.layout.flags(best.estimate.shape))}"]

    def _line(self, found: Found) -> str:
        layout, time, needed = found.estimate.layout, found.time, found.ran.needed
        sizes: tuple[tuple[int, int], ...] = (
            *((size, 4) for size in _sizes(layout)),
            (layout.data, 6),
            (layout.micro_batch, 7),
        )
        text = "".join(f"{size:>{width}}" for size, width in sizes)
        text += f"{layout.recomputed:>11}{'yes' if layout.shared else 'no':>8}"
        size = "no run" if needed is None else size_text(needed)
        text += f"{size:>12}{time.total * self.calibration.factor:>9.3g}s"
        mark = "*" if found.wait_is_formula else ""
        parts = ((time.computing + time.updating, "", 9), (time.waiting, mark, 6), (time.sending, "", 6))
        for part, note, width in parts:
            text += f"{f'{100 * part / time.total:.0f}%{note}':>{width}}"
        if needed is None:
            return f"{text}  {found.ran.why[:100]}"
        return text if self.fits(found) else f"{text}  does not fit"


def _not_beaten(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Drop a layout if another layout with the same parallel sizes needs neither more memory nor more
    time.
    """
    best: dict[tuple[int, ...], list[tuple[float, float, Estimate]]] = {}
    for each in estimates:
        key = (*_sizes(each.layout), each.layout.micro_batch)
        best.setdefault(key, []).append((each.time().total, each.memory(), each))
    kept = []
    for listed in best.values():
        least = float("inf")
        for _, memory, each in sorted(listed, key=lambda item: item[:2]):
            if memory < least:
                least = memory
                kept.append(each)
    return kept


def _sizes(layout: Layout) -> tuple[int, int, int, int, int]:
    return layout.tensor, layout.pipeline, layout.chunks, layout.context, layout.expert
