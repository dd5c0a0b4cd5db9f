"""Support scripts that use ``load_metric``, which version 3 of ``datasets`` removed."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.rapidformer import state
from megatron_npu.finetune.run import metrics


class Metric:
    """A metric that collects predictions and references, and computes its values from all of them.

    Args:
        glue: GLUE task whose metrics are computed. If None, accuracy, F1 and Matthews' correlation are
            computed.
    """

    def __init__(self, glue: str | None = None) -> None:
        self._glue = glue
        self._predictions: list[np.ndarray] = []
        self._references: list[np.ndarray] = []

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        """Add a batch of predictions and references (tensors, arrays or lists ``[b]``)."""
        self._predictions.append(_array(predictions))
        self._references.append(_array(references))

    def compute(self) -> dict[str, float]:
        """Compute the metrics over all batches added since the last call, and return them by name.

        Raises:
            UsageError: no batches were added.
        """
        if not self._predictions:
            raise UsageError(
                "compute() was called on a metric that has no batches. Call add_batch with predictions and "
                "references before compute()."
            )
        predictions, references = np.concatenate(self._predictions), np.concatenate(self._references)
        self._predictions, self._references = [], []
        if self._glue == "stsb":
            return metrics.regression(predictions, references)
        classes = _classes() or int(max(predictions.max(), references.max())) + 1
        return metrics.classification(predictions, references, self._glue, classes=classes)


def load_metric(path: str | None = None, name: str | None = None) -> Metric:
    """Return the metrics that belong to a dataset, as ``datasets.load_metric`` did.

    Args:
        path: path of the dataset; accepted for compatibility.
        name: the configuration of the dataset; the name of a GLUE task selects the metrics of that task.
    """
    return Metric(name if name in metrics.GLUE else None)


def _classes() -> int | None:
    """Return the number of classes of this run's model, or None if it is not known."""
    run = state.run()
    prepared = [engine.prepared for engine in run.engines if engine.prepared is not None] if run else []
    config = getattr(prepared[-1].module, "config", None) if prepared else None
    return getattr(config, "num_labels", None)


def _array(values: Any) -> np.ndarray:
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)
