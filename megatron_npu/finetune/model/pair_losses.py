"""Support models with a masked-word head and a next-sentence head, which return the sum of both losses.

A batch has one sentence pair per sample but a different number of masked words, so the two means are weighted
by different label counts. Transformers models return only the sum; the second loss is therefore recomputed
from the logits of the next-sentence head.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

LABEL = "next_sentence_label"


class PairLoss:
    """Separates the next-sentence loss from the sum of losses that a model returns.

    Args:
        model: a model for which ``has_pairs`` returns True; its outputs are recorded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._last: Tensor | None = None
        model.register_forward_hook(self._look, with_kwargs=True)

    def _look(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        labels, logits = kwargs.get(LABEL), getattr(outputs, "seq_relationship_logits", None)
        self._last = None
        if isinstance(labels, Tensor) and isinstance(logits, Tensor):
            self._last = cross_entropy(logits.float(), labels.view(-1))

    def split(self, loss: Tensor) -> tuple[Tensor, ...]:
        """Return the masked-word loss and the next-sentence loss of the last forward pass, given their sum.

        If the next-sentence loss cannot be determined (for example with tuple outputs), the whole sum counts
        as word loss.
        """
        of_pairs, self._last = self._last, None
        return (loss, 0 * loss) if of_pairs is None else (loss - of_pairs, of_pairs)


def has_pairs(model: nn.Module) -> bool:
    """Return True if a model has both a masked-word head and a next-sentence head."""
    own: Any = model
    if hasattr(own, "get_base_model"):  # of peft's adapters
        own = own.get_base_model()
    return LABEL in inspect.signature(type(own).forward).parameters and hasattr(own, "get_output_embeddings")
