"""Detect bad iterations before their weight update, and then recompute them, skip them, or rewind the run.

``--rerun-mode validate_results`` corresponds to megatron-core's rerun state machine (0.16): an iteration with
an unexpected result is computed again from the same state, to distinguish a device that computes incorrectly
from bad data or weights. --loss-spike-policy, which upstream lacks, then selects the reaction.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_npu import devices, watchdog
from megatron_npu.checkpoint_files import replicas
from megatron_npu.pretrain.checkpoint import checkpoint_files, checkpoints, generators, whole_checkpoints
from megatron_npu.pretrain.checkpoint.checkpoints import Position, State
from megatron_npu.pretrain.flags.checkpoint_parts import LoadFlags
from megatron_npu.pretrain.flags.run_plan import RunPlan
from megatron_npu.pretrain.run.divergence import DivergedError, Spikes
from megatron_npu.pretrain.run.losses import loss

LEFT_OUT = 10  # updates one after the other: more are no accident of the data
GONE_BACK = 3  # times to the same checkpoint


@dataclass(frozen=True)
class Fault:
    """The problem that was found in an iteration, such as a loss spike.

    Attributes:
        words: a description for logs and errors.
        is_leap: True if the loss and gradients are finite but the loss spikes.
    """

    words: str
    is_leap: bool = False


class Replay(Iterator[Any]):
    """Iterator that can repeat all items since the last call of ``begin``.

    Args:
        source: an iterator over micro batches.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._kept, self._at = source, list[Any](), 0

    def __next__(self) -> Any:
        if self._at == len(self._kept):
            self._kept.append(next(self._source))
        self._at += 1
        return self._kept[self._at - 1]

    def begin(self) -> None:
        """Discard stored items at the start of a new iteration."""
        self._kept, self._at = [], 0

    def again(self) -> None:
        """Repeat the items since the last call of ``begin``."""
        self._at = 0


class Guard:
    """Checks each iteration before its weight update.

    Without the two flags, this has no effect and no cost.

    With them, each iteration waits for its loss, with two small collectives, and all gradients are checked.

    Args:
        plan: the plan of the run.
        state: the model and the optimizer.
        spikes: the loss-spike detector.
        say: prints a line on rank 0.
    """

    def __init__(self, plan: RunPlan, state: State, spikes: Spikes, say: Callable[[str], None]) -> None:
        self.plan, self.state, self.spikes, self.say = plan, state, spikes, say
        self.reruns = plan.guard.rerun_mode != "disabled"
        self.acts = plan.guard.loss_spike_policy != "note"
        self.watches = self.reruns or self.acts
        self._left_out = 0
        self._gone_back: dict[int, int] = {}
        self._random: dict[str, Any] = {}
        self._data: list[Replay] = []

    def batches(self, found: list[Iterator[Any]] | None) -> list[Iterator[Any]] | None:
        """Make a run's micro-batches repeatable if iterations may have to be recomputed."""
        if found is None or not self.reruns:
            return found
        self._data = [Replay(each) for each in found]
        return [*self._data]

    def begin(self) -> None:
        """Store the state from which the current iteration can be recomputed."""
        if self.reruns:
            self._random = generators.state()
            for each in self._data:
                each.begin()

    def judged(
        self, number: int, sums: torch.Tensor, compute: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, Fault | None]:
        """Check an iteration after its gradients are complete.

        All ranks must call this and get the same result.

        Args:
            number: the number of the iteration, counted from 1.
            sums: the result of ``Trainer._forward``, [2].
            compute: computes the gradients again and returns the same kind of result.

        Returns:
            The sums to use, and the problem, if any.
        """
        fault = self._fault(number, sums)
        if fault is not None and self.reruns:
            sums, fault = self._again(number, sums, fault, compute)
        if fault is None:
            self._left_out = 0
        return sums, fault

    def _fault(self, number: int, sums: torch.Tensor) -> Fault | None:
        (value,) = loss.means(sums[None])
        if not math.isfinite(value):
            # fp16's scaler leaves such an update out by itself, and lowers the scale
            return None if self.plan.guard.fp16 else Fault(f"the loss is {value} at iteration {number}")
        if not self.plan.guard.fp16 and not self._gradients_are_finite():
            return Fault(f"a gradient is not finite at iteration {number}")
        leap = self.spikes.leap(number, value)
        if leap is None or not self.acts:
            self.spikes.take(value)
        return None if leap is None else Fault(leap, is_leap=True)

    def _gradients_are_finite(self) -> bool:
        found = torch.zeros(1, dtype=torch.int32, device=devices.current().torch_device())
        for chunk in self.state.model:
            for parameter in chunk.parameters():
                gradient = replicas.gradient(parameter)
                if gradient is not None:
                    found += (~torch.isfinite(_local(gradient))).any()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return not found.item()

    def _again(
        self, number: int, sums: torch.Tensor, fault: Fault, compute: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, Fault | None]:
        """Recompute an iteration from the same state, and use the second result."""
        generators.set_state(self._random)
        for each in self._data:
            each.again()
        second = compute()
        same = torch.equal(sums.view(torch.int32), second.view(torch.int32))
        places: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(places, None if same else f"{dist.get_rank()} ({socket.gethostname()})")
        wrong = [place for place in places if place is not None]
        if not wrong:
            return second, replace(
                fault, words=f"{fault.words}; repeating the iteration gave the same result"
            )
        (value,) = loss.means(second[None])
        self.say(
            f" {fault.words}; repeating the iteration gave a loss of {value:.4f}, which differs "
            f"on rank {', '.join(wrong)}: the rank's device or memory may be faulty. The second "
            "result is used"
        )
        return second, self._fault(number, second)

    def leave_out(self, fault: Fault) -> None:
        """Log that a weight update is skipped.

        Raises:
            DivergedError: too many consecutive updates were skipped.
        """
        self._left_out += 1
        if self._left_out > LEFT_OUT:
            raise DivergedError(
                f"{fault.words}; the updates of the previous {LEFT_OUT} iterations were skipped too. "
                "Lower --lr, check the data, or resume from an older checkpoint (--ckpt-step)."
            )
        self.say(f" {fault.words}: its update is skipped")

    @watchdog.phase("loading")
    def goes_back_to(self) -> int | None:
        """Return the iteration of the newest complete checkpoint of this run, or None.

        All ranks must call this and get the same result.
        """
        found = [whole_checkpoints.newest_whole(self.plan.flags.save) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found, 0)
        return found[0]

    def go_back(self, iteration: int, fault: Fault, position: Position) -> Position:
        """Load an earlier checkpoint of this run.

        Return the position at which training continues, after the samples already used.

        Args:
            iteration: the iteration of the checkpoint.
            fault: the problem that caused the rewind.
            position: the run's current position, including the samples of the bad iteration.

        Raises:
            DivergedError: the run has returned to this checkpoint too often.
        """
        self._gone_back[iteration] = times = self._gone_back.get(iteration, 0) + 1
        if times > GONE_BACK:
            raise DivergedError(
                f"{fault.words}; the run has returned to iteration {iteration} {GONE_BACK} times. Lower "
                "--lr, check the data, or resume from an older checkpoint (--ckpt-step)."
            )
        changes = {"load": self.plan.flags.save, "ckpt_step": iteration, "load_optim": True, "load_rng": True}
        saved = checkpoints.load(LoadFlags.of(self.plan.flags.changed(**changes, finetune=False)), self.state)
        self._left_out = 0
        self.say(
            f" {fault.words}: returned to {checkpoint_files.directory(self.plan.flags.save, iteration)}; "
            f"samples {saved.train_samples} to {position.train_samples - 1} are skipped"
        )
        return Position(saved.iteration, position.train_samples, position.valid_samples)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient.

    torch's FSDP may have sharded it.
    """
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient
