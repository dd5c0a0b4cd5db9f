"""Record the memory of a rank over time, as a snapshot for torch's visualizer and as a curve for each
purpose.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_npu.base import files

KINDS = ("weights", "gradients", "optimizer", "other")
_POINTS = 400  # of a curve


def keep(
    snapshot: dict[str, Any], addresses: Mapping[str, list[int]], report: dict[str, Any], path: str | None
) -> None:
    """Add the memory curve to the report of a rank, and write the snapshot to a file if one is given.

    Args:
        snapshot: the result of ``torch.cuda.memory._snapshot`` or of the same function in ``torch.npu``.
        addresses: the addresses of persistent memory, by kind.
        report: the rank's report.
        path: the file, which pytorch.org/memory_viz can read.
    """
    (events,) = [trace for trace in snapshot["device_traces"] if trace] or [[]]
    report["curve"] = curve(events, addresses)
    if path:
        files.write(Path(path), pickle.dumps(snapshot))


def curve(events: Iterable[Mapping[str, Any]], addresses: Mapping[str, list[int]]) -> list[list[int]]:
    """Return the memory in use over time for each of ``KINDS``, as maxima over a limited number of intervals.

    Persistent memory is recognized by its address: it is the longest-lived block at that address.

    Args:
        events: the events of one device, in the format of a snapshot.
        addresses: the addresses of persistent memory, by kind.
    """
    changes = [each for each in events if each["action"] in ("alloc", "free_requested")]
    lives = _longest(changes)
    kind_of = {lives[at]: kind for kind, listed in addresses.items() for at in listed if at in lives}
    now, alive, found = dict.fromkeys(KINDS, 0), {}, []
    for number, event in enumerate(changes):
        address = event["addr"]
        if event["action"] == "alloc":
            alive[address] = (kind_of.get(number, "other"), event["size"])
            now[alive[address][0]] += event["size"]
        elif address in alive:
            kind, size = alive.pop(address)
            now[kind] -= size
        found.append([now[kind] for kind in KINDS])
    return _thinned(found)


def _longest(changes: list[Mapping[str, Any]]) -> dict[int, int]:
    """Return, for each address, the index in ``changes`` of its longest-lived allocation."""
    begun: dict[int, int] = {}
    longest: dict[int, tuple[int, int]] = {}  # address -> (how long, number)
    for number, event in enumerate(changes):
        address = event["addr"]
        if event["action"] == "alloc":
            begun[address] = number
        elif address in begun:
            start = begun.pop(address)
            longest[address] = max(longest.get(address, (0, 0)), (number - start, start))
    for address, start in begun.items():
        longest[address] = max(longest.get(address, (0, 0)), (len(changes) - start, start))
    return {address: start for address, (_, start) in longest.items()}


def _thinned(points: list[list[int]]) -> list[list[int]]:
    width = max(1, -(-len(points) // _POINTS))
    return [max(points[at : at + width], key=sum) for at in range(0, len(points), width)]
