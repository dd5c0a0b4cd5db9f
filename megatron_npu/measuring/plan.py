"""Convert flags to jobs, with defaults for the device, and find the rows that cannot run on this machine."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass

from megatron_npu.base import output_files
from megatron_npu.base.arg_parser import Unfit
from megatron_npu.base.errors import UsageError
from megatron_npu.base.installed_packages import is_installed
from megatron_npu.measuring import estimate
from megatron_npu.measuring.job import Job, Setting
from megatron_npu.measuring.machine import Machine
from megatron_npu.measuring.ranks import NA, OOM, Outcome
from megatron_npu.measuring.schemes import SUITES, Scheme, Suite
from megatron_npu.measuring.sizes import Size
from megatron_npu.options.switch_rules import Place, refuse
from megatron_npu.pretrain.run import host_memory

_DOCUMENTED_DEVICES = 4
_SHARE = 0.8  # of the available memory of the host


@dataclass(frozen=True, kw_only=True)
class Plan(Setting):
    """The plan of a measurement.

    ``memory_limit`` is the value that the user has given.

    Attributes:
        suite: the suite.
        machine: the machine.
        said: log lines about values that were chosen automatically.
    """

    suite: Suite
    machine: Machine
    said: tuple[str, ...] = ()

    def job(self, scheme: Scheme) -> Job:
        """Return the job for the ranks of a row, with the amount of memory that each rank may currently
        use.
        """
        setting = self.setting() | {"memory_limit": self._limit()}
        return Job(workload=self.suite.workload, scheme=scheme, **setting)

    def _limit(self) -> int | None:
        """Return the memory limit of a rank in bytes, or None if only the device limits the memory."""
        if self.memory_limit is not None or not self.machine.is_host:
            return self.memory_limit
        return self._share_of_the_host()

    def _share_of_the_host(self) -> int:
        return int(_SHARE * host_memory.available() / self.ranks)

    def outcome_beforehand(self, job: Job) -> Outcome | None:
        """Return the outcome of a row (OOM or NA) if it is known without running the row."""
        reason = self._unfit(job.scheme) or _refused(job, self.machine.kind)
        if reason:
            return Outcome(NA, reason)
        limits = [job.memory_limit] if job.memory_limit is not None else []
        if self.machine.host_memory:
            limits.append(self._share_of_the_host())
        needed = estimate.bytes_of_a_rank(job, self.suite.family, host_is_device=self.machine.host_memory)
        if limits and needed > min(limits):
            return Outcome(
                OOM,
                f"not started, because a rank needs an estimated {needed >> 20} MB or more, but only "
                f"{min(limits) >> 20} MB are available",
            )
        return None

    def _unfit(self, scheme: Scheme) -> str:
        parallel = scheme.tensor * scheme.pipeline
        if self.ranks % parallel:
            return (
                f"{scheme.name} requires a number of devices that is a multiple of {parallel}, but "
                f"there are {self.ranks}"
            )
        if self.size.heads % scheme.tensor:
            return f"{self.size.heads} heads cannot be divided among {scheme.tensor} ranks"
        if self.size.layers % scheme.pipeline:
            return f"{self.size.layers} layers cannot be divided among {scheme.pipeline} stages"
        if self.global_batch_size % (self.micro_batch_size * (self.ranks // parallel)):
            return "the global batch is not a multiple of the micro batch times the ranks"
        if scheme.sharding != "none" and self.ranks == 1:
            return "a single rank has no other rank to shard over"
        return ""


def _refused(job: Job, device: str) -> str:
    """Return the reason why the switches of a row cannot be combined on this machine, or an empty string."""
    scheme = job.scheme
    place = Place(
        "megatron" if job.workload.startswith("megatron:") else "transformers",
        device,
        cut=scheme.tensor * scheme.pipeline > 1,
        alone=job.data_parallel_size == 1,
    )
    try:
        refuse(job.switches, place)
    except UsageError as error:
        return error.problem
    return ""


def plan(args: Namespace, machine: Machine) -> Plan:
    """Return the plan for the given flags, after filling in defaults.

    Raises:
        UsageError: a size or batch fits no row, devices are unavailable, or files cannot be written.
    """
    suite, small = SUITES[args.suite], machine.host_memory
    _check_surroundings(args)
    model, said = _model(args.model, suite, small)
    ranks = _ranks(args.devices, machine)
    micro = args.micro_batch_size or (suite.small_micro_batch_size if small else suite.micro_batch_size)
    whole = args.global_batch_size or micro * ranks
    if whole % (micro * ranks):
        raise UsageError(
            f"--global-batch-size must be a multiple of {micro * ranks} (micro batch size {micro} x {ranks} "
            f"devices), but got {whole}. Change one of the three flags."
        )
    return Plan(
        suite=suite,
        machine=machine,
        said=said,
        size=_size(args, suite, model),
        ranks=ranks,
        micro_batch_size=micro,
        global_batch_size=whole,
        steps=args.steps,
        repeat=args.repeat,
        mixed_precision=args.mixed_precision,
        seed=args.seed,
        memory_limit=args.memory_limit,
    )


def _model(asked: str | None, suite: Suite, small: bool) -> tuple[str, tuple[str, ...]]:
    """Return the name of the model, and a log line if the model was chosen automatically."""
    documented = suite.family.documented
    if asked is not None:
        return asked, ()
    if not small:
        return documented, (f"--model {documented} is used, as in the document",)
    name = suite.family.sizes[0].name
    return name, (
        f"--model {name} is used, because it is small enough to run quickly here; the document uses "
        f"{documented}",
    )


def _size(args: Namespace, suite: Suite, model: str) -> Size:
    try:
        return suite.family.size(model, args.seq_length, args.vocab_size)
    except Unfit as unfit:
        raise UsageError(
            f"--model must be {unfit.expected} with --suite {suite.name}, but got {unfit.given}. Use one of "
            "these models."
        ) from None


def _ranks(asked: int | None, machine: Machine) -> int:
    if machine.count is None:
        return asked or _DOCUMENTED_DEVICES
    if asked is not None and asked > machine.count:
        raise UsageError(
            f"--devices must be at most {machine.count}, the number of devices of this machine, but got "
            f"{asked}. Pass fewer, or use a machine with more devices."
        )
    return asked or min(_DOCUMENTED_DEVICES, machine.count)


def _check_surroundings(args: Namespace) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "`megatron-npu bench` must be started as a single process, because it starts its own ranks, but "
            "it was started under torchrun. Start it without torchrun."
        )
    if args.plot is not None and not is_installed("matplotlib"):
        raise UsageError(
            "--plot requires matplotlib, which is not installed. Install it: pip install matplotlib"
        )
    output_files.require_writable(args.json, args.markdown, args.plot)
