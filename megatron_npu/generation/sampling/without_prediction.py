"""Use a GPT model without its multi-token prediction layers, which only training needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def without_prediction(chunks: Sequence[Any]) -> Iterator[None]:
    """Skip the multi-token prediction layers inside the ``with`` block.

    Args:
        chunks: this process's GPTModels, unwrapped; they share one configuration.
    """
    config = chunks[0].config
    layers = config.mtp_num_layers
    predicting = [chunk for chunk in chunks if getattr(chunk, "mtp_process", False)]
    config.mtp_num_layers = None  # since 0.16 the output layer asks the configuration
    for chunk in predicting:
        chunk.mtp_process = False
    try:
        yield
    finally:
        config.mtp_num_layers = layers
        for chunk in predicting:
            chunk.mtp_process = True
