"""Patch ``megatron.core.datasets``, in which samples share a loss mask and ``--split`` is parsed
incorrectly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import backport, own_backport
from megatron_npu.base.errors import UsageError


@own_backport(
    "megatron.core.datasets.gpt_dataset:GPTDataset.__getitem__",
    until="not fixed up to 0.19.2, #6981",
    why="samples share one loss mask: positions that are padding in the first sample count in no later one; "
    "up to 0.14 those of any sample (#1711)",
)
def give_out_copy_of_mask(
    original: Callable[..., dict[str, Tensor]], self: Any, *args: Any, **kwargs: Any
) -> dict[str, Tensor]:
    """Give each sample its own copy of the loss mask, and reset the cached mask to a mask without padding."""
    sample = original(self, *args, **kwargs)
    if self.masks_and_position_ids_are_cacheable:  # every place counts then
        sample["loss_mask"] = sample["loss_mask"].clone()
        self.cached_loss_mask.fill_(1.0)
    return sample


@backport(
    "megatron.core.datasets.blended_megatron_dataset_config:parse_and_normalize_split",
    until="not fixed up to 0.19.2, #7512",
    why="--split finds its numbers only by digits and dots: -1,1,0 is read as 1,1,0 and nan,1,0 as 1,0,0, "
    "and 1e3,1,0 raises an AssertionError",
)
def read_split(original: Callable[[str], list[float]], split: str) -> list[float]:
    """Parse the numbers of ``--split`` in the same way as Python, and reject anything else.

    Raises:
        UsageError: a part is not a number, is negative or is not finite.
    """
    if not re.search(r"[^\W\d]|[+-]", split):  # with any separators, as upstream takes them
        return original(split)
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError:
        shares = [math.nan]
    if not all(0 <= share < math.inf for share in shares):
        raise UsageError(
            "--split must consist of non-negative numbers, separated by commas, but got "
            f"{split!r}. Pass, for example, --split 969,30,1."
        )
    return original(",".join(f"{share:.12f}" for share in shares))
