"""Format the report of a plan: a line for each kind of rank, its communication, and whether the job fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_npu.planning.job import ITERATIONS, TRAIN, Job

_GIB = 1 << 30
_LINES = 40  # of a report
_FEWEST, _GROUPS = 4, 9  # lines of ranks at least, and of process groups at most


@dataclass
class Row:
    """A group of equivalent ranks, and the measurements of one of these ranks.

    Attributes:
        rank: the rank that was run.
        stage: its pipeline stage.
        stands_for: the number of ranks in the group.
        found: the rank's report.
        fits: whether it fits; None if this is unknown, because the rank did not train.
    """

    rank: int
    stage: int
    stands_for: int
    found: dict[str, Any]
    fits: bool | None = None

    @property
    def failed(self) -> str | None:
        """The reason why the rank did not train, or None if it did."""
        if self.found.get("error"):
            return str(self.found["error"])
        if self.found.get("code"):
            lines = [line for line in self.found.get("log", "").splitlines() if "error:" in line]
            return lines[-1] if lines else f"ended with exit code {self.found['code']}"
        return None if self.found.get("updates") or self.found.get("ready") else "no optimizer step ran"

    @property
    def buffers(self) -> int:
        """The number of bytes that HCCL's communication buffers occupy."""
        return sum(group["buffer"] for group in self.found.get("groups", {}).values())

    @property
    def needed(self) -> int:
        """The number of bytes of device memory that the rank needs."""
        return self.found["reserved"] + self.buffers


@dataclass
class Plan:
    """The results of planning a job.

    ``lines`` returns the printed report.

    Attributes:
        routed: multiples of an even share of the tokens, each with the bytes that the fullest rank then
            needs.
        remedy: flags that make the job fit, with the resulting peak; None if there are none, or none are
            needed.
    """

    job: Job
    device: str
    memory: int
    devices_per_node: int
    rows: list[Row]
    remedy: tuple[list[str], int] | None = None
    routed: dict[float, int] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> Row | None:
        """The first rank that did not train, or None if all ranks did."""
        return next((row for row in self.rows if row.failed and not row.found.get("out_of_memory")), None)

    @property
    def endless(self) -> Row | None:
        """The first rank that requested more memory than a process can reserve on this machine, or None."""
        return next((row for row in self.rows if row.found.get("out_of_memory")), None)

    @property
    def fullest(self) -> Row:
        return max(self.rows, key=lambda row: row.needed)

    @property
    def too_full(self) -> Row | None:
        """The rank with the highest memory peak if this rank does not fit, or None."""
        full = [row for row in self.rows if row.fits is False]
        return max(full, key=lambda row: row.needed) if full else None

    def lines(self) -> list[str]:
        job = self.job
        _, count = job.words()
        head = (
            f"{job.devices} x {self.device} of {size_text(self.memory)}: tensor {job.tensor}, pipeline "
            f"{job.pipeline}, context {job.context}, data {job.data}; {job.micro_batches} micro "
            "batches"
        )
        said = [head + (f" ({count} of them run)" if count != job.micro_batches else ""), ""]
        below = ["", *self._traffic(self.fullest, count), self._buffers(self.fullest)]
        if count != job.micro_batches:
            below.append("not counted: the losses of micro batches that were not run, about 512 bytes each")
        below += ["", *self._assumed(), *self._verdict()]
        return [*said, *self._table(_LINES - len(said) - len(below)), *below]

    def _table(self, most: int) -> list[str]:
        """Return a line for each kind of rank.

        If there are more than ``most``, return those of the fullest ranks.
        """
        titles = "stage alike weights gradients optimizer activations logits peak reserved comm.".split()
        shown = self.rows
        if len(shown) + 1 > most:
            kept = max(_FEWEST, most - 2)
            shown = sorted(sorted(shown, key=lambda row: -row.needed)[:kept], key=lambda row: row.rank)
        lines = [_line("rank", titles, "place of the peak")]
        for row in shown:
            found = row.found
            lasting = found["weights"] + found["gradients"] + found["optimizer"]
            cells = [row.stage, row.stands_for, *map(size_text, (found["weights"], found["gradients"]))]
            cells += map(size_text, (found["optimizer"], max(0, found["peak"] - lasting), found["logits"]))
            cells += map(size_text, (found["peak"], found["reserved"], row.buffers))
            lines.append(_line(row.rank, cells, found["place"]))
        if len(self.rows) > len(shown):
            lines.append(
                f"  and {len(self.rows) - len(shown)} kinds of ranks that need less (listed with --json FILE)"
            )
        return lines

    def _traffic(self, row: Row, count: int) -> list[str]:
        # a collective of one rank sends nothing
        groups = {
            name: each for name, each in row.found["groups"].items() if each["calls"] and each["ranks"] > 1
        }
        if not groups:
            return ["no communication"]
        lines = [
            f"sent by rank {row.rank} at the start and in {ITERATIONS} iterations of {count} micro batches:"
        ]
        for name, group in sorted(groups.items(), key=lambda item: -item[1]["bytes"])[:_GROUPS]:
            first, last = row.found.get("members", {}).get(name, [row.rank, row.rank])
            across = first // self.devices_per_node != last // self.devices_per_node
            lines.append(
                f"  {name.lower():<44} {group['ranks']:>5} ranks {group['calls']:>7} calls "
                f"{size_text(group['bytes']):>10}  {'across machines' if across else 'within a machine'}"
            )
        return lines

    def _buffers(self, row: Row) -> str:
        """Describe the memory that communicators use and that torch's allocator does not manage."""
        groups = row.found.get("groups", {}).values()
        if self.device == "cuda":
            count = sum(group["ranks"] > 1 for group in groups)
            return (
                f"not counted: the buffers of NCCL's communicators ({count} with traffic on rank {row.rank}; "
                "NCCL_BUFFSIZE sets their size)"
            )
        sizes = Counter(group["buffer"] // 2 for group in groups if group["buffer"])
        if not sizes:
            return "comm.: no communicator has a buffer"
        parts = " + ".join(f"{count} x 2 x {size_text(size)}" for size, count in sorted(sizes.items()))
        return (
            f"comm.: HCCL's two buffers of each communicator, on rank {row.rank}: {parts} (HCCL_BUFFSIZE "
            "sets their size, 200 MiB if unset)"
        )

    def _assumed(self) -> list[str]:
        lines = self._asked()
        if self.job.family == TRAIN:
            lines.append(
                "samples: each rank has the batches of its first two iterations; longer samples need more "
                "memory"
            )
        lines += self._routed()
        lines += self._of_cuda()
        lines.append("not counted: the context of the device and its libraries, delays from slow peers")
        lines[-1] += ", loading, evaluation, saving"
        return lines

    def _asked(self) -> list[str]:
        """Report the lines of the program that read values which were not computed."""
        asked = sorted({key for each in self.rows for key in each.found.get("asked", {})})
        if not asked:
            return []
        npu, cuda = "1 (integers: 0; booleans: true for `all`, else false)", "0 (true for `equal`)"
        value = npu if self.device == "npu" else cuda
        head = f"values of tensors that are not computed were assumed to be {value} in {len(asked)} line(s):"
        more = [f"  and {len(asked) - 3} more (--json FILE has them)"] * (len(asked) > 3)
        return [head, *(f"  {key}" for key in asked[:3]), *more]

    def _of_cuda(self) -> list[str]:
        lines = []
        if any(each.found.get("plain_attention") for each in self.rows):
            why = sorted({why for each in self.rows for why in each.found.get("plain_attention", [])})
            lines.append(
                f"attention uses torch's unfused formula ({', '.join(why)}), which needs more activation "
                "memory"
            )
        if reasons := {
            str(each.found["without_triton"]) for each in self.rows if each.found.get("without_triton")
        }:
            lines.append(
                f"CUDA with torch's kernels ({', '.join(sorted(reasons))}): this package's kernels need "
                "less memory"
            )
        if self.device == "cuda":
            lines.append("cuda: fake tensors and a simulation of torch's caching allocator")
        return lines

    def _routed(self) -> list[str]:
        if not self.job.routes_freely:
            return []
        if not self.routed:
            return ["the number of tokens per expert is not known: their memory depends on computed values"]
        parts = (f"{size_text(size)} at {multiple:.3g}" for multiple, size in sorted(self.routed.items()))
        return [
            f"experts get {next(iter(self.routed)):.3g} x an even share of the tokens (--expert-imbalance); "
            f"rank {self.fullest.rank} needs {', '.join(parts)}"
        ]

    def _verdict(self) -> list[str]:
        full = self.too_full
        if full is None:
            row = self.fullest
            return [f"fits: rank {row.rank} needs {size_text(row.needed)} of {size_text(self.memory)}"]
        lines = [f"does not fit: rank {full.rank} needs {size_text(full.needed)} of {size_text(self.memory)}"]
        if self.remedy is not None:
            flags, needed = self.remedy
            lines.append(f"fits with: {' '.join(flags)} (rank {full.rank} then needs {size_text(needed)})")
        elif self.tried:
            lines.append(f"does not fit with any of: {'; '.join(self.tried)}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return all results as values for JSON, with sizes in bytes."""
        _, count = self.job.words()
        return {
            "devices": self.job.devices,
            "device": self.device,
            "memory": self.memory,
            "micro_batches": self.job.micro_batches,
            "micro_batches_run": count,
            "iterations": ITERATIONS,
            "fits": self.too_full is None,
            "expert_imbalance": [{"share": share, "needed": size} for share, size in self.routed.items()],
            "remedy": None if self.remedy is None else {"flags": self.remedy[0], "needed": self.remedy[1]},
            "seconds": round(self.seconds, 1),
            "ranks": [
                {
                    **{key: value for key, value in row.found.items() if key != "log"},
                    "stage": row.stage,
                    "stands_for": row.stands_for,
                    "buffers": row.buffers,
                    "fits": row.fits,
                }
                for row in self.rows
            ],
        }


def _line(rank: object, cells: Sequence[object], place: str) -> str:
    """Return one line of the table.

    The first two cells are counts, and the others are sizes.
    """
    text = "".join(f"{cell:>{12 if at > 1 else 7}}" for at, cell in enumerate(cells))
    return f"{rank:>6}{text}  {place}"


def size_text(count: int) -> str:
    """Format a number of bytes with a suitable unit."""
    if count >= _GIB:
        return f"{count / _GIB:.2f} GiB"
    return f"{count / (1 << 20):.1f} MiB" if count >= 1 << 20 else f"{count / 1024:.1f} KiB" if count else "0"
