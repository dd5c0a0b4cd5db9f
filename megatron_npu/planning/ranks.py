"""Run the ranks of a planned job in separate processes, one per core at a time."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_npu.base import settings
from megatron_npu.base.arg_parser import byte_size
from megatron_npu.base.errors import UsageError
from megatron_npu.devices import cores
from megatron_npu.planning.hosts import Hosts
from megatron_npu.planning.job import Job
from megatron_npu.process import python_child
from megatron_npu.sim import launcher, site

LIMIT = "1M"  # what is larger is not computed
ENOUGH = "4096G"  # of memory, so that a rank says what it needs and not that it does not fit
_LONGEST = 1800  # seconds


class _Batches:
    """The folders of the batches that ranks have broadcast, one for each command line."""

    def __init__(self) -> None:
        self._folders: dict[tuple[str, ...], tempfile.TemporaryDirectory[str]] = {}
        self._sent: set[tuple[str, int]] = set()

    def folder(self, words: Iterable[str]) -> str:
        """Return the folder for the batches of a command line.

        The folder is removed when this process ends.
        """
        key = tuple(words)
        if key not in self._folders:
            self._folders[key] = tempfile.TemporaryDirectory(prefix="megatron-npu-batches-")
        return self._folders[key].name

    def missing(self, folder: str, senders: Iterable[int]) -> list[int]:
        """Return the ranks among ``senders`` that have not run with a folder yet, and record them as run."""
        found = [rank for rank in dict.fromkeys(senders) if (folder, rank) not in self._sent]
        self._sent.update((folder, rank) for rank in found)
        return found


@dataclass(frozen=True)
class Ranks:
    """Runs the ranks of a job on a simulated device.

    Attributes:
        device: ``npu`` or ``cuda``.
        per_node: the number of devices per machine.
        computed: the number of bytes up to which the simulated NPU computes tensors; see the setting.
        curve: whether a rank reports its memory over time.
        snapshot: the file to which a rank writes a snapshot for torch's visualizer.
        imbalance: the tokens of this rank's experts, as a multiple of an even share.
        check: whether a rank ends before training, after it has read checkpoint descriptions and data.
        hosts: the processes that fork for ranks; copies of this object share them.
        batches: what ranks have broadcast to others that run later; copies of this object share it.
    """

    device: str
    environment: dict[str, str]
    per_node: int = 8
    computed: str = LIMIT
    curve: bool = False
    snapshot: Path | None = None
    check: bool = False
    imbalance: float = 1.0
    hosts: Hosts = field(default_factory=Hosts, compare=False)
    batches: _Batches = field(default_factory=_Batches, compare=False)

    @property
    def by_batch(self) -> bool:
        """True if the simulation includes ranks that receive their batches from other ranks, so that
        these batches must be known.
        """
        return self.device == "npu"

    @classmethod
    def on(cls, device: str, per_node: int = 8) -> Ranks:
        """Prepare the simulation of a device, with ``per_node`` devices on each machine.

        Raises:
            UsageError: the device cannot be prepared here.
        """
        if device == "npu":
            return cls(device, launcher.prepare(), per_node)
        from megatron_npu.planning.fake_cuda import library

        site.require_cpu_build("plan --device cuda")
        why = library.unavailable()
        if why is not None:
            raise UsageError(f"--device cuda requires Linux and g++ on PATH: {why}", remedy="Install g++.")
        library.built()
        return cls(device, dict(os.environ), per_node)

    def run(self, job: Job, numbers: Iterable[int], memory: int | None = None) -> dict[int, dict[str, Any]]:
        """Return the report of each rank, keyed by its number.

        Args:
            job: the job to which the ranks belong.
            numbers: the ranks to run.
            memory: the number of bytes per device. If None, memory is unlimited.
        """
        wanted = list(dict.fromkeys(numbers))
        # the job's rank 0 writes the data's indices, and the others wait for them
        found = {0: self._run(job, 0, memory)} if job.has_data and wanted != [0] else {}
        sending = [number for number in wanted if job.sender(number) == number]
        receiving = [number for number in wanted if job.sender(number) != number]
        if self.by_batch:
            folder = self.batches.folder(self._words(job))
            self.batches.missing(folder, [*found, *sending])
            sending = self.batches.missing(folder, map(job.sender, receiving)) + sending
        with ThreadPoolExecutor(len(cores.available())) as pool:
            try:
                for part in (sending, receiving):
                    others = [number for number in part if number not in found]
                    found |= pool.map(lambda number: (number, self._run(job, number, memory)), others)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.hosts.end()  # the threads wait for its ranks
                raise
        return {number: found[number] for number in wanted}

    def _words(self, job: Job) -> list[str]:
        return job.whole_words() if self.check else job.words()[0]

    def _run(self, job: Job, number: int, memory: int | None) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="megatron-npu-plan-") as name:
            folder = Path(name)
            words = self._words(job)
            told = {"words": words, "output": str(folder / "report.json"), "alone": True}
            told |= {"limit": byte_size(ENOUGH) if memory is None else memory}  # of CUDA's allocator
            told |= {"batches": self.batches.folder(words)} if self.by_batch else {}
            told |= {"check": self.check, "imbalance": self.imbalance}
            # not its real path: a link in a folder of others is replaced, and what it leads to stays
            told |= {"curve": self.curve, "snapshot": self.snapshot and str(self.snapshot.absolute())}
            (folder / "rank.json").write_text(json.dumps(told), encoding="utf-8")
            environment = self._environment_of(job, 0, None)  # of the host, the same for all ranks
            request = {
                "specification": str(folder / "rank.json"),
                "log": str(folder / "log"),
                "environment": self._place_of(job, number, memory),
            }
            code, why = self.hosts.run(self.device, job.start, environment, request, _LONGEST)
            log = folder / "log"
            said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else why
            path = folder / "report.json"
            if not path.exists():
                words_ = f"no result after {_LONGEST} s" if code is None else f"ended with exit code {code}"
                return {"rank": number, "code": code, "error": words_, "log": said[-4000:]}
            return {**json.loads(path.read_text(encoding="utf-8")), "log": said[-4000:]}

    def _place_of(self, job: Job, number: int, memory: int | None) -> dict[str, str]:
        """Return the environment variables that tell a process which rank it is."""
        place = {
            "RANK": number,
            "LOCAL_RANK": number % self.per_node,
            "WORLD_SIZE": job.devices,
            "LOCAL_WORLD_SIZE": min(job.devices, self.per_node),
            "MASTER_ADDR": "localhost",  # named, but nobody meets there
            "MASTER_PORT": 1,
            "OMP_NUM_THREADS": 1,
            settings.WATCHDOG.name: 0,
        }
        if self.device == "npu":
            place[settings.SIM_DEVICES.name] = self.per_node
            place[settings.SIM_DRY.name] = self.computed
            place[settings.SIM_MEMORY.name] = ENOUGH if memory is None else memory
        return {name: str(value) for name, value in place.items()}

    def _environment_of(self, job: Job, number: int, memory: int | None) -> dict[str, str]:
        environment = {**self.environment, **self._place_of(job, number, memory)}
        environment["PYTHONPATH"] = os.pathsep.join(
            dict.fromkeys(
                filter(
                    None,
                    [*self.environment.get("PYTHONPATH", "").split(os.pathsep), python_child.search_path()],
                )
            )
        )
        return environment
