"""The picture of a table: throughput and memory of each row."""

from __future__ import annotations

from pathlib import Path

from megatron_npu import files
from megatron_npu.benching.report import Report


def draw(report: Report, path: Path) -> None:
    """Write a PNG: samples per second with their deviation on the left, peak memory on the right.

    A row without numbers has its word (OOM, NA) in the place of a bar.

    Raises:
        ModuleNotFoundError: matplotlib is absent (``plan.check`` asks before).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, plan = report.rows, report.plan
    figure = Figure(figsize=(10, 1.2 + 0.45 * len(rows)), layout="constrained")
    throughput, memory = figure.subplots(1, 2, sharey=True)
    for place, row in enumerate(rows):
        if row.is_measured:
            if not plan.machine.simulated:
                throughput.barh(place, row.throughput, xerr=row.deviation, color="tab:blue", capsize=3)
            memory.barh(place, row.peak, color="tab:orange")
            continue
        word = row.outcome.kind if row.outcome else "not measured"
        for axes in (throughput, memory):
            axes.text(0.01, place, word, transform=axes.get_yaxis_transform(), va="center")
    throughput.set_yticks(range(len(rows)), [row.scheme.name for row in rows])
    throughput.set_ylim(len(rows) - 0.5, -0.5)  # the first row on top
    throughput.set_xlabel("samples per second" + " (simulated: left out)" * plan.machine.simulated)
    memory.set_xlabel("peak memory of the largest rank (MB)")
    figure.suptitle(f"{plan.suite.name}: {plan.size.name} on {plan.ranks} x {plan.machine.device}")
    for axes in (throughput, memory):
        axes.grid(axis="x", alpha=0.3)
    with files.writing(path) as stream:
        FigureCanvasAgg(figure).print_png(stream)
