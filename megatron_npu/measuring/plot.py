"""Plot the throughput and the memory of each row of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_npu.base import files
from megatron_npu.measuring.ranks import MEASURED
from megatron_npu.measuring.schemes import SUITES


def draw(table: dict[str, Any], path: Path) -> None:
    """Write a PNG image with samples per second and their deviation on the left, and peak memory on the
    right.

    Rows without values show their outcome (OOM, NA) instead of a bar.

    Args:
        table: the result of ``Report.to_json``, or the content of a ``--json`` file.
        path: the path of the image.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (``plan.check`` checks this before).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, columns = table["rows"], SUITES[table["suite"]].columns
    figure = Figure(figsize=(10, 1.2 + 0.45 * len(rows)), layout="constrained")
    throughput, memory = figure.subplots(1, 2, sharey=True)
    for place, row in enumerate(rows):
        if row["outcome"] == MEASURED:
            if "samples_per_second" in row:
                deviation = row["standard_deviation"]
                throughput.barh(place, row["samples_per_second"], xerr=deviation, color="tab:blue", capsize=3)
            memory.barh(place, row["peak_mb"], color="tab:orange")
            continue
        for axes in (throughput, memory):
            axes.text(0.01, place, row["outcome"], transform=axes.get_yaxis_transform(), va="center")
    simulated = any(row["outcome"] == MEASURED and "samples_per_second" not in row for row in rows)
    names = [" x ".join(row[column] for column in columns) for row in rows]
    throughput.set_yticks(range(len(rows)), names)
    throughput.set_ylim(len(rows) - 0.5, -0.5)  # the first row on top
    throughput.set_xlabel("samples per second" + " (simulated: omitted)" * simulated)
    memory.set_xlabel("peak memory of the largest rank (MB)")
    figure.suptitle(f"{table['suite']}: {table['model']['name']} on {table['devices']} x {table['device']}")
    for axes in (throughput, memory):
        axes.grid(axis="x", alpha=0.3)
    with files.writing(path) as stream:
        FigureCanvasAgg(figure).print_png(stream)
