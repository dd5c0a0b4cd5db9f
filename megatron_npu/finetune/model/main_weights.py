"""Manage main weights, which the optimizer updates instead of the model's own weights.

Main weights are either shards (ZeRO-1) or copies on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# torch 2.13 renamed it
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_GATHERED = 1 << 20  # values that one collective brings together


@dataclass
class _Weight:
    """A parameter of the model, with the part of it that this rank's optimizer updates.

    Attributes:
        main: the tensor that the optimizer updates: the parameter itself, a row shard, or a copy on the host.
        step: the number of rows per shard, or 0 if the parameter is not sharded.
    """

    parameter: nn.Parameter
    main: nn.Parameter
    step: int

    def rows(self, rank: int, of: Tensor) -> Tensor:
        """Return a view of the rows of the tensor ``of`` that belong to ``rank``.

        ``of`` has the parameter's shape.
        """
        return of[rank * self.step : (rank + 1) * self.step] if self.step else of

    @property
    def padded(self) -> int:
        """The number of values in a shard, padded so that all ranks send the same number."""
        return self.step * self.parameter.numel() // max(1, self.parameter.shape[0])


class MainWeights:
    """Main weights, which an optimizer updates instead of a model's own weights.

    Before a step, each main weight receives its gradient; after the step, the model receives the new values.
    Both happen in ``optimizer.step()`` once ``follow`` has been called. Sharded main weights are DTensors
    that are split by rows as in FSDP2, so that checkpoints can be loaded with different sharding, and
    optimizers that need whole tensors work. If a weight has fewer rows than there are ranks, some ranks have
    no rows of it. Scalars are not split.

    Args:
        trained: the model's trained parameters by name.
        mesh: the ranks over which weights are sharded. If None, each rank has all weights.
        host: whether to keep main weights and optimizer states in host memory.
    """

    def __init__(self, trained: dict[str, nn.Parameter], mesh: DeviceMesh | None, host: bool) -> None:
        self.mesh, self.host = mesh, host
        self.rank = mesh.get_local_rank() if mesh is not None else 0
        self._follows = True
        self.weights = {name: self._weight(parameter) for name, parameter in trained.items()}

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """The main weights by parameter name."""
        return {name: weight.main for name, weight in self.weights.items()}

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Call ``pull`` before each optimizer step and ``push`` after it."""
        optimizer.register_step_pre_hook(lambda *_: self.pull() if self._follows else None)
        optimizer.register_step_post_hook(lambda *_: self.push() if self._follows else None)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Run optimizer steps without changing the model, for example to create the optimizer state."""
        self._follows = False
        yield
        self._follows = True

    @torch.no_grad()
    def pull(self) -> None:
        """Copy the model's gradients to the main weights, and free the gradients on the device."""
        for weight in self.weights.values():
            gradient = weight.parameter.grad
            if gradient is None:
                weight.main.grad = None
            elif weight.main is not weight.parameter:
                weight.main.grad = self._like_main(weight, weight.rows(self.rank, gradient))
                if self.host:
                    weight.parameter.grad = None

    @torch.no_grad()
    def push(self) -> None:
        """Copy the updated weights to the model on every rank, and clear the model's gradients."""
        for weight in self.weights.values():
            if self.host:
                weight.rows(self.rank, weight.parameter).copy_(_local(weight.main))
            weight.parameter.grad = None
            weight.main.grad = None
        for bunch in self._bunches():
            self._gather(bunch)

    @torch.no_grad()
    def take(self) -> None:
        """Copy the model's weights to the main weights after a checkpoint has been loaded."""
        if self.host:
            for weight in self.weights.values():
                _local(weight.main).copy_(weight.rows(self.rank, weight.parameter))

    def _weight(self, parameter: nn.Parameter) -> _Weight:
        ranks = self.mesh.size() if self.mesh is not None else 1
        step = -(-parameter.shape[0] // ranks) if self.mesh is not None and parameter.ndim else 0
        if not step and not self.host:
            return _Weight(parameter, parameter, 0)
        weight = _Weight(parameter, parameter, step)
        part = weight.rows(self.rank, parameter.detach())
        weight.main = nn.Parameter(self._like_main(weight, part))
        return weight

    def _like_main(self, weight: _Weight, part: Tensor) -> Tensor:
        """Return this rank's part of a weight or a gradient, on the optimizer's device and in the
        optimizer's layout.
        """
        if self.host:
            part = part.to("cpu", copy=True)
        if not weight.step or self.mesh is None:
            return part
        whole = weight.parameter
        spec = DTensorSpec(
            self.mesh, (Shard(0),), tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype)
        )
        # not from_local, which moves what rests on the host to the mesh's device; FSDP2 makes them so, too
        return DTensor(part, spec, requires_grad=False)  # type: ignore[call-arg]

    def _bunches(self) -> Iterator[list[_Weight]]:
        """Yield groups of sharded weights that have the same dtype and device.

        One collective gathers each group.
        """
        open_: dict[Any, list[_Weight]] = {}
        ranks = self.mesh.size() if self.mesh is not None else 1
        for weight in self.weights.values():
            if not weight.step:
                continue
            key = (weight.parameter.dtype, weight.parameter.device)
            bunch = open_.setdefault(key, [])
            if bunch and ranks * sum(w.padded for w in (*bunch, weight)) > _GATHERED:
                yield open_.pop(key)
                bunch = open_.setdefault(key, [])
            bunch.append(weight)
        yield from open_.values()

    def _gather(self, bunch: list[_Weight]) -> None:
        """All-gather the rows of the given weights from all ranks."""
        assert self.mesh is not None
        sizes = [weight.padded for weight in bunch]
        like = bunch[0].parameter
        mine = like.new_empty(sum(sizes))
        for weight, space in zip(bunch, mine.split(sizes), strict=True):
            rows = weight.rows(self.rank, weight.parameter)
            space[: rows.numel()].view_as(rows).copy_(rows)
        everyone = like.new_empty(self.mesh.size() * mine.numel())
        _all_gather(everyone, mine, group=self.mesh.get_group())
        for rank, parts in enumerate(everyone.chunk(self.mesh.size())):
            if rank == self.rank:
                continue
            for weight, space in zip(bunch, parts.split(sizes), strict=True):
                rows = weight.rows(rank, weight.parameter)
                rows.copy_(space[: rows.numel()].view_as(rows))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
