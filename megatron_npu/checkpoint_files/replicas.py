"""Check that the weights and gradients of data-parallel replicas are bitwise identical.

If a bit flips in a rank's memory, a core computes incorrect results, or a program changes weights on one rank
only, no error is raised, but the replicas diverge. Each rank sends a 16-byte digest; if the digests differ,
digests of all tensors follow, to identify the first differing tensor and the ranks with another value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

_T = TypeVar("_T")
Named: TypeAlias = "Iterable[tuple[str, Tensor]]"


class ReplicasDifferError(RuntimeError):
    """Raised when replicas have diverged, because training would continue with different models on different
    ranks.

    Args:
        what: ``weight`` or ``gradient of``.
        name: the name of the first tensor that differs.
        ranks: all ranks, grouped by equal values; the largest group first.
        others: the number of other tensors that differ.
    """

    def __init__(self, what: str, name: str, ranks: Sequence[Sequence[int]], others: int) -> None:
        self.what, self.name, self.ranks, self.others = what, name, ranks, others
        super().__init__(
            f"the {what} {name} differs between data-parallel ranks: "
            f"{_sides(ranks)}{(f'; other affected tensors: {others}' if others else '')}. "
            "Either a device or its memory is faulty, or the program changed the tensor on "
            "only one rank: test that machine, and resume from an earlier checkpoint."
        )

    def __reduce__(self) -> tuple[type[ReplicasDifferError], tuple[str, str, Sequence[Sequence[int]], int]]:
        """Return the data for pickling the error, so that ranks can send it to each other."""
        return type(self), (self.what, self.name, self.ranks, self.others)


def _sides(ranks: Sequence[Sequence[int]]) -> str:
    usual, *rest = ranks
    if len(usual) == len(rest[0]):  # nobody knows which of them is right
        return " and ".join(_few(side) for side in ranks) + " differ"
    return f"{', '.join(map(_few, rest))} differ{'s' * (len(rest) == len(rest[0]) == 1)} from {_few(usual)}"


def _few(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' * (len(ranks) > 1)} {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"


def require_equal(what: str, named: Named, group: dist.ProcessGroup | None = None) -> None:
    """Check that the tensors on all ranks of a group are bitwise identical.

    All of these ranks must call this.

    Each tensor is copied to the host and hashed there (XXH3), which is exact and the same for every device.

    Args:
        what: ``weight`` or ``gradient of``.
        named: names and tensors, in the same order on all ranks.
        group: the ranks. If None, all ranks.

    Raises:
        ReplicasDifferError: the tensors differ; raised on every rank of the group.
    """
    if dist.get_world_size(group) == 1:
        return
    digests = {name: digest(tensor) for name, tensor in named}
    if len(set(_gathered(_together(digests), group))) > 1:
        _tell(what, _gathered(digests, group), _members(group))


def digest(tensor: Tensor) -> bytes:
    """Return a 16-byte digest of all bits of a tensor of any shape and dtype on any device."""
    import xxhash

    host: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_128_digest(host)


def _together(digests: dict[str, bytes]) -> bytes:
    import xxhash

    return xxhash.xxh3_128_digest(b"".join(digests.values()))


def _gathered(value: _T, group: dist.ProcessGroup | None) -> list[_T]:
    result = [value] * dist.get_world_size(group)
    dist.all_gather_object(result, value, group=group)
    return result


def _members(group: dist.ProcessGroup | None) -> list[int]:
    return list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)


def _tell(what: str, digests: list[dict[str, bytes]], ranks: list[int]) -> None:
    """Raise ``ReplicasDifferError``, given the digests of all tensors on each of the ``ranks``."""
    names = dict.fromkeys(name for each in digests for name in each)
    differing = [name for name in names if len({each.get(name) for each in digests}) > 1]
    first = [each.get(differing[0]) for each in digests]
    sides = [
        [rank for rank, held in zip(ranks, first, strict=True) if held == side]
        for side, _ in Counter(first).most_common()
    ]
    raise ReplicasDifferError(what, differing[0], sides, len(differing) - 1)


def check_megatron(chunks: Sequence[nn.Module]) -> None:
    """Check that the weights of a Megatron model are identical on all replicas.

    All ranks must call this, with parameters gathered.

    Dense weights must be the same on all data- and context-parallel ranks, and experts' weights on all ranks
    of expert data parallelism.

    Args:
        chunks: the model chunks of this rank, with or without ``DistributedDataParallel``.

    Raises:
        ReplicasDifferError: some weights differ.
    """
    _check_both("weight", [(name, p.data, p) for name, p in _parameters(chunks)])


def check_megatron_gradients(chunks: Sequence[Any]) -> None:
    """Check that the reduced gradients of a Megatron model are identical on all replicas, before the
    optimizer's step.

    With the distributed optimizer, there is nothing to compare, because each rank has only its own part of
    the sums.

    Args:
        chunks: the model chunks of this rank, each with ``ddp_config``.

    Raises:
        ReplicasDifferError: some gradients differ.
    """
    if not any(chunk.ddp_config.use_distributed_optimizer for chunk in chunks):
        found = [(name, gradient(p), p) for name, p in _parameters(chunks)]
        _check_both("gradient of", [(name, tensor, p) for name, tensor, p in found if tensor is not None])


def gradient(parameter: Any) -> Tensor | None:
    """Return the gradient of a parameter from Megatron's buffer or, without such a buffer, its own
    gradient.
    """
    return parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad


def _parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for number, chunk in enumerate(chunks):
        place = f"chunk {number}: " if len(chunks) > 1 else ""
        for name, parameter in chunk.named_parameters():
            yield place + name.removeprefix("module.").removeprefix("module."), parameter


def _check_both(what: str, found: Sequence[tuple[str, Tensor, nn.Parameter]]) -> None:
    """Check dense parameters and expert parameters, each within the group of ranks that have replicas of
    them.
    """
    from megatron.core import parallel_state

    dense = [(name, tensor) for name, tensor, p in found if getattr(p, "allreduce", True)]
    experts = [(name, tensor) for name, tensor, p in found if not getattr(p, "allreduce", True)]
    require_equal(what, dense, parallel_state.get_data_parallel_group(with_context_parallel=True))
    if experts:
        require_equal(what, experts, parallel_state.get_expert_data_parallel_group())
