"""Find tokens that have no embedding before a training step uses them, and report them in a one-line error.

Such a token causes an IndexError in the middle of a step on a CPU, and reads unrelated memory on a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatron_npu.base.errors import UsageError

_TOKENS = "input_ids"
_ROWS = 10_000  # of a data set that are looked at together


def size_of(model: nn.Module) -> int | None:
    """Return the number of token embeddings of a Transformers model, or None if it is unknown."""
    try:
        embeddings = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # no such model, or one without embeddings of tokens
        return None
    return getattr(embeddings, "num_embeddings", None)


def require_known(batch: Any, size: int | None) -> None:
    """Check that all ``input_ids`` of a batch in host memory have embeddings.

    Args:
        batch: a mapping whose ``input_ids`` have any shape and an integer dtype; other batches are not
            checked.
        size: the result of ``size_of``.

    Raises:
        UsageError: a token is out of range.
    """
    tokens = batch.get(_TOKENS) if isinstance(batch, Mapping) else None
    if size is None or not isinstance(tokens, torch.Tensor) or not tokens.numel():
        return
    largest = int(tokens.max())
    if largest >= size:
        raise _unknown("a batch", largest, size)


def require_known_column(dataset: Any, size: int | None, what: str) -> None:
    """Check that all tokens in a dataset of the ``datasets`` package have embeddings.

    Other datasets are not checked.

    Args:
        dataset: a tokenized dataset with a column ``input_ids``.
        size: the result of ``size_of``.
        what: description of the dataset for the error.

    Raises:
        UsageError: a token is out of range.
    """
    if size is None or _TOKENS not in (getattr(dataset, "column_names", None) or ()):
        return
    import pyarrow.compute

    for rows in dataset.select_columns([_TOKENS]).with_format("arrow").iter(_ROWS):
        largest = pyarrow.compute.max(pyarrow.compute.list_flatten(rows[_TOKENS])).as_py()
        if largest is not None and largest >= size:
            raise _unknown(what, largest, size)


def _unknown(what: str, token: int, size: int) -> UsageError:
    return UsageError(
        f"{what} contains the token id {token}, but the model has {size} tokens, so ids must be from 0 to "
        f"{size - 1}. Use the tokenizer that the model was trained with, or "
        "resize_token_embeddings(len(tokenizer))."
    )
