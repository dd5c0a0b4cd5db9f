"""Create the HTML page of a plan, which contains the printed report and the memory of each rank over time."""

from __future__ import annotations

import html

from megatron_npu.planning.report import Plan, Row, size_text
from megatron_npu.planning.timeline import KINDS

_COLOURS = ("#4269d0", "#efb118", "#3ca951", "#ff725c")
_SHOWN = {"other": "activations and temporary"}
_WIDTH, _HEIGHT, _LEFT, _BELOW = 860, 240, 90, 24
_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 1em;color:#1b1e23}"
    "pre{background:#f4f5f7;padding:1em;overflow-x:auto;font-size:12.5px}svg{width:100%;height:auto}"
    "text{font:12px system-ui,sans-serif;fill:#444}.key span{display:inline-block;margin-right:1.5em}"
    ".key i{display:inline-block;width:.9em;height:.9em;margin-right:.4em;vertical-align:-.1em}"
)


def page(plan: Plan) -> str:
    """Return the page as HTML, which loads no resources and runs no scripts."""
    job = plan.job
    command = html.escape(" ".join([*job.start, *job.flags]))
    keys = "".join(
        f'<span><i style="background:{colour}"></i>{_SHOWN.get(kind, kind)}</span>'
        for kind, colour in zip(KINDS, _COLOURS, strict=True)
    )
    charts = "".join(_chart(plan, row) for row in plan.rows if row.found.get("curve"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>megatron-npu plan</title>'
        f"<style>{_STYLE}</style></head><body><h1>Plan of {job.devices} devices</h1>"
        f"<p><code>{command}</code></p><pre>{html.escape(chr(10).join(plan.lines()))}</pre>"
        f"<h2>Allocated memory of each rank</h2>"
        "<p>From building the model to the end of the second iteration. The axis counts allocations and "
        "frees, because a dry run measures no time. On npu the curve shows the requested bytes; the peak is "
        "the allocator's, which includes rounding. A dashed line marks the memory of one device less the "
        "buffers of its communicators, where it is not far above the curve.</p>"
        f'<p class="key">{keys}</p>{charts}</body></html>\n'
    )


def _chart(plan: Plan, row: Row) -> str:
    curve: list[list[int]] = row.found["curve"]
    highest = max(map(sum, curve)) or 1
    available = max(0, plan.memory - row.buffers)
    shown = max(highest, available) if available < 2 * highest else highest
    peak = size_text(row.found["peak"])
    title = f"rank {row.rank}, stage {row.stage}, represents {row.stands_for}: peak {peak}"
    if row.buffers:
        title += f", and {size_text(row.buffers)} for communicators"
    parts = [
        f"<h3>{title}</h3>",
        f'<svg viewBox="0 0 {_LEFT + _WIDTH} {_HEIGHT + _BELOW}" role="img" aria-label="{title}">',
    ]
    below = [0] * len(curve)
    for number, colour in enumerate(_COLOURS):
        above = [base + point[number] for base, point in zip(below, curve, strict=True)]
        points = [*_points(above, shown), *reversed(_points(below, shown))]
        parts.append(f'<polygon fill="{colour}" points="{" ".join(points)}"/>')
        below = above
    for part in range(5):
        y = _HEIGHT - _HEIGHT * part / 4
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:g}" y2="{y:g}" stroke="#0002"/>')
        label = size_text(int(shown * part / 4))
        parts.append(f'<text x="{_LEFT - 6}" y="{max(y + 4, 11):g}" text-anchor="end">{label}</text>')
    if shown >= available:
        y = _HEIGHT - _HEIGHT * available / shown
        place = f'x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:g}" y2="{y:g}"'
        parts.append(f'<line {place} stroke="#c00" stroke-dasharray="6 4"/>')
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT + 18}">allocations and frees, in order</text></svg>')
    return "".join(parts)


def _points(values: list[int], highest: int) -> list[str]:
    step = _WIDTH / max(1, len(values) - 1)
    return [
        f"{_LEFT + step * at:.1f},{_HEIGHT - _HEIGHT * value / highest:.1f}"
        for at, value in enumerate(values)
    ]
