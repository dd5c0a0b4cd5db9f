"""Describe the job to be planned: its command line, its layout, and the ranks that represent all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_npu.base import digits, files, settings
from megatron_npu.base.errors import UsageError
from megatron_npu.upstream import megatrons, stock_tools

TRAIN = "train"  # the family of models of Transformers and of users
ITERATIONS = 2  # the second one has the optimizer's states from its beginning
# of what is written or read beside the training, which a dry run leaves out: flags with a value, and without
_WRITTEN = (
    "--save --save-interval --object-storage --tensorboard-dir --wandb-project --wandb-exp-name "
    "--wandb-save-dir --log-interval --num-workers --dashboard --metrics"
).split()
_LEFT_OUT = [*_WRITTEN, "--load", "--exit-interval", "--pretrained-checkpoint", "--ckpt-step"]
# of how ranks read a checkpoint together
_TOGETHER = ("--ckpt-fully-parallel-load", "--dist-ckpt-strictness")
_DATA = "--data-path --train-data-path --data-args-path --per-split-data-args-path --dataset".split()
# of `train`: how long it trains, its evaluations, and how many ranks a machine starts
_OF_TRAIN = (
    "--epochs --train-iters --eval-interval --lr-warmup-iters --lr-decay-iters --nproc-per-node --json-log "
    "--plot --no-plot --load-last-good --save-per-machine"
).split()
_SHARDED = (
    *("--use-distributed-optimizer", "--use-torch-fsdp2", "--use-megatron-fsdp", "--zero-stage"),
    *("--fsdp-memory-optimization", *(f"--zero-{stage}-memory-optimization" for stage in (1, 2, 3))),
)
_LEFT_OUT_ALONE = "--async-save --finetune --check-for-nan-in-loss-and-grad".split()


@dataclass(frozen=True)
class Job:
    """The command line of a job and its number of devices.

    Attributes:
        devices: the number of devices, with one rank on each.
        start: the words before the program's own flags: ``pretrain``, ``train``, or ``run SCRIPT``.
        flags: the program's own flags.
        family: the Megatron that parses the flags, as named in ``upstream.megatrons``; or ``TRAIN``.
    """

    devices: int
    start: tuple[str, ...]
    flags: tuple[str, ...]
    family: str = "megatron_core"

    @classmethod
    def of(cls, devices: int, command: Sequence[str]) -> Job:
        """Create a job from the words after ``--`` on the command line.

        Raises:
            UsageError: the program cannot be planned.
        """
        words = list(command)
        if words[:1] == ["run"]:
            words = words[1:]
        if words[:1] == ["train"]:
            return cls(devices, ("train",), tuple(words[1:]), TRAIN)._checked()
        if words[:1] == ["pretrain"]:
            return cls(devices, ("pretrain",), tuple(words[1:]))._checked()
        if words and words[0].endswith(".py"):
            if not Path(words[0]).is_file():
                raise UsageError(
                    f"the script {words[0]} does not exist, or is not a file",
                    remedy=files.nearest(words[0]),
                )
            return cls(devices, ("run", words[0]), tuple(words[1:]), _family(Path(words[0])))._checked()
        given = f"{words[0]} cannot be planned" if words else "no command was given"
        raise UsageError(
            f"{given}; the job's command must be -- pretrain ARGUMENTS..., -- train ARGUMENTS..., or -- "
            "pretrain_gpt.py ARGUMENTS...",
            remedy="Put it after --.",
        )

    def number(self, flag: str, default: int) -> int:
        """Return the value of an integer flag.

        If the flag is repeated, the last value applies.
        """
        value = default
        for at, word in enumerate(self.flags):
            text = self.flags[at + 1] if word == flag and at + 1 < len(self.flags) else None
            if word.startswith(f"{flag}="):
                text = word.partition("=")[2]
            number = None if text is None else digits.number(text)
            value = value if number is None else number
        return value

    def has(self, flag: str) -> bool:
        """Return True if the command line contains a flag."""
        return any(word == flag or word.startswith(f"{flag}=") for word in self.flags)

    @property
    def has_data(self) -> bool:
        """True if the job reads data from files."""
        return any(map(self.has, _DATA))

    @property
    def tensor(self) -> int:
        return self.number("--tensor-model-parallel-size", 1)

    @property
    def pipeline(self) -> int:
        return self.number("--pipeline-model-parallel-size", 1)

    @property
    def context(self) -> int:
        return self.number("--context-parallel-size", 1)

    @property
    def data(self) -> int:
        return self.devices // (self.tensor * self.pipeline * self.context)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches per iteration on each rank."""
        batch = self.number("--global-batch-size", 0)
        size = self.number("--micro-batch-size", 8 if self.family == TRAIN else 1)
        return batch // (size * self.data) if batch else 1

    def with_flags(self, *words: str) -> Job:
        """Return the job with additional flags, which override flags given before."""
        return replace(self, flags=(*self.flags, *words))

    def without(self, *flags: str) -> Job:
        """Return the job without the given flags and their values."""
        kept: list[str] = []
        skipping = False
        for word in self.flags:
            if word.startswith("--"):
                skipping = word.partition("=")[0] in flags
            if not skipping:
                kept.append(word)
        return replace(self, flags=tuple(kept))

    def stages(self) -> dict[int, list[int]]:
        """Return the ranks of each pipeline stage."""
        each = self.devices // self.pipeline
        if self.has("--use-tp-pp-dp-mapping"):
            inner = self.tensor * self.context
            found: dict[int, list[int]] = {stage: [] for stage in range(self.pipeline)}
            for rank in range(self.devices):
                found[rank // inner % self.pipeline].append(rank)
            return found
        return {stage: list(range(stage * each, (stage + 1) * each)) for stage in range(self.pipeline)}

    def representatives(self, by_batch: bool = True) -> dict[int, tuple[int, int]]:
        """Return the ranks to run, each with its pipeline stage and the number of ranks that it
        represents.
        """
        return {ranks[0]: (stage, len(ranks)) for stage, ranks in self.classes(by_batch)}

    def classes(self, by_batch: bool = True) -> list[tuple[int, list[int]]]:
        """Return groups of equivalent ranks, each with its pipeline stage.

        Only the first rank of each group is run.

        Each stage is a group. Where optimizer states or weights are sharded over the data- and
        context-parallel ranks, the ranks with the last shard are a separate group, because padding can make
        it smaller. Experts are sharded over fewer ranks, so their last shards are on other ranks. In scripts,
        the ranks that receive their batches from another one are separate too, because they allocate other
        small tensors than the rank that reads the data; ``by_batch=False`` does not separate them.
        """
        found = []
        for stage, ranks in self.stages().items():
            begins = sorted({0, *(len(ranks) - size for size in self._last_shards() if size < len(ranks))})
            ends = [*begins[1:], len(ranks)]
            for begin, end in zip(begins, ends, strict=True):
                alike = ranks[begin:end]
                found += [(stage, part) for part in (self._by_batch(alike) if by_batch else [alike])]
        return found

    def _by_batch(self, ranks: list[int]) -> list[list[int]]:
        """Separate the ranks that read data from the ranks that receive data from them."""
        reading = [rank for rank in ranks if self.sender(rank) == rank]
        receiving = [rank for rank in ranks if self.sender(rank) != rank]
        return [part for part in (reading, receiving) if part]

    def sender(self, rank: int) -> int:
        """Return the rank that reads the data for a given rank.

        In scripts, it is the first tensor-parallel rank.
        """
        return rank - rank % self.tensor if self.start[0] == "run" else rank

    def _last_shards(self) -> list[int]:
        """Return how many ranks at the end of a stage have the last shard of the weights or of the
        experts.
        """
        if not self.is_sharded:
            return []
        experts = self.number("--expert-model-parallel-size", 1)
        return [self.tensor, self.number("--expert-tensor-parallel-size", self.tensor) * experts]

    def words(self) -> tuple[list[str], int]:
        """Return the command line for a planned rank, and its number of micro-batches per iteration.

        Micro batches beyond twice the depth of the pipeline do not change the peak and are omitted.
        """
        job = self.without(*_LEFT_OUT, *_LEFT_OUT_ALONE)
        if self.family == TRAIN:
            # one more than it ends after, so that nothing is evaluated
            ending = ("--train-iters", str(ITERATIONS + 1), "--exit-interval", str(ITERATIONS))
            more = ("--eval-interval", "1000000", "--num-workers", "0", "--log-interval", "1", "--no-plot")
            return [*job.start, *job.without(*_OF_TRAIN).with_flags(*ending, *more).flags], self.micro_batches
        count = self.micro_batches
        depth = 2 * self.pipeline
        if count > depth and self.number("--micro-batch-size", 0):
            count = depth
            batch = count * self.number("--micro-batch-size", 1) * self.data
            job = job.without("--global-batch-size", "--rampup-batch-size").with_flags(
                "--global-batch-size", str(batch)
            )
        job = job.with_flags("--num-workers", "0", "--log-interval", "1", "--eval-iters", "0")
        job = job._ending()
        return [*job.start, *job.flags], count

    @property
    def is_sharded(self) -> bool:
        """True if data-parallel ranks shard optimizer states or weights among themselves."""
        return any(map(self.has, _SHARDED))

    @property
    def routes_freely(self) -> bool:
        """True if the number of tokens that each expert receives depends on computed values."""
        return self.has("--num-experts") and not self.has("--moe-pad-expert-input-to-capacity")

    @property
    def reads(self) -> bool:
        """True if the job reads files that may be incompatible with it, such as a checkpoint or data."""
        return self.has_data or self.has("--load") or self.has("--pretrained-checkpoint")

    def whole_words(self) -> list[str]:
        """Return the command line of a rank that reads all input of the job and ends before it trains."""
        job = self.without(*_WRITTEN, *_TOGETHER, "--async-save", "--nproc-per-node")
        job = job.with_flags("--num-workers", "0")
        return [*job.start, *job.flags]

    def _ending(self) -> Job:
        """Return the job, changed so that it ends after ``ITERATIONS`` iterations and accepts a NaN loss."""
        if self.family == "megatron_core":  # a loss that nobody has computed is no number
            return self.with_flags("--no-check-for-nan-in-loss-and-grad", "--exit-interval", str(ITERATIONS))
        # trees of old save where --exit-interval ends them, wherever --save says; the learning rate's decay
        # is that of the whole job, whose warm-up is shorter than it
        if samples := self.number("--train-samples", 0):
            batch = self.number("--global-batch-size", self.number("--micro-batch-size", 1) * self.data)
            return self._shortened("samples", samples, ITERATIONS * batch)
        return self._shortened("iters", self.number("--train-iters", ITERATIONS), ITERATIONS)

    def _shortened(self, unit: str, whole: int, few: int) -> Job:
        decay = [] if self.has(f"--lr-decay-{unit}") else [f"--lr-decay-{unit}", str(whole)]
        return self.with_flags(*decay, f"--train-{unit}", str(min(whole, few)))

    def _checked(self) -> Job:
        sizes = self.tensor * self.pipeline * self.context
        if self.devices % sizes:
            raise UsageError(
                f"--devices must be a multiple of {sizes}, the product of {self.tensor} (tensor), "
                f"{self.pipeline} (pipeline) and {self.context} (context), but got {self.devices}",
                remedy="Change --devices or a parallel size.",
            )
        return self


def _family(script: Path) -> str:
    """Return the Megatron that parses a script's flags, which is the script's own checkout or the
    installed one.
    """
    named = settings.MEGATRON_PATH.get()
    tree = Path(named) if named else stock_tools.tree_of(script) or script.resolve().parent
    found = megatrons.inside(tree)
    return found.name if found is not None else "megatron_core"
