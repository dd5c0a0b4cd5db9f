"""Seconds that checksum verification adds to loading a checkpoint: before the load, and during the load.

    python benchmarks/checkpoint_load.py --gigabytes 1 --rounds 9 [--cold] [--json FILE]

The checkpoint is torch's (``torch.distributed.checkpoint``), read like megatron-core does, by one process in
one thread. The three ways take turns, so that changes in the machine's speed affect all of them equally;
quote the ratios of pairs. With --cold the kernel drops the files from the page cache before each load
(``posix_fadvise``). No Megatron is needed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import page_cache
import report
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from megatron_npu.checkpoint_files import checksums

TENSORS = 48


def weights(gigabytes: float) -> dict[str, torch.Tensor]:
    """Return fp32 tensors [n] with a total size of ``gigabytes`` GB."""
    each = int(gigabytes * 1e9 / 4 / TENSORS)
    return {f"layer.{number}": torch.rand(each) for number in range(TENSORS)}


def load(folder: Path, into: dict[str, torch.Tensor]) -> None:
    """Read the checkpoint into existing tensors."""
    dcp.load(into, storage_reader=FileSystemReader(folder), no_dist=True)


def before(folder: Path, into: dict[str, torch.Tensor]) -> None:
    """Verify the files, then read them."""
    assert not checksums.damaged(folder)
    load(folder, into)


def beside(folder: Path, into: dict[str, torch.Tensor]) -> None:
    """Verify the files while they are read."""
    with checksums.verifying(folder):
        load(folder, into)


WAYS: dict[str, Callable[[Path, dict[str, torch.Tensor]], None]] = {
    "load": load,
    "before": before,
    "beside": beside,
}


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cold", action="store_true", help="read from the disk, without the page cache")
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure (default: the disk of /tmp)"
    )
    parser.add_argument("--json", type=Path, default=report.RESULTS / "checkpoint_load.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    into = weights(given.gigabytes)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    cpu: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        dcp.save(into, storage_writer=FileSystemWriter(folder), no_dist=True)
        checksums.write(folder)
        for number in range(given.rounds + 1):  # the first warms up
            for way, run in WAYS.items():
                if given.cold:
                    page_cache.forget(folder)
                start, spent = time.perf_counter(), time.process_time()
                run(folder, into)
                if number:
                    seconds[way].append((time.perf_counter() - start) / given.gigabytes)
                    cpu[way].append((time.process_time() - spent) / given.gigabytes)
    added = {
        way: [other / alone - 1 for other, alone in zip(seconds[way], seconds["load"], strict=True)]
        for way in ("before", "beside")
    }
    for way in WAYS:
        wall, used = statistics.median(seconds[way]), statistics.median(cpu[way])
        print(f"{way:8} {wall:.3f} s a GB (best {min(seconds[way]):.3f}), of a processor {used:.3f}")
    for way, ratios in added.items():
        print(f"{way:8} adds {100 * statistics.median(ratios):+.1f} % in the median of {given.rounds} pairs")
    results = {
        "gigabytes": given.gigabytes,
        "cold": given.cold,
        "seconds_a_gb": seconds,
        "processor_a_gb": cpu,
    }
    report.write(given.json, {**results, "added": added})


if __name__ == "__main__":
    main()
