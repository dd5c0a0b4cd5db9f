"""Stub for ``megatron.model.vision.knn_monitor`` (Megatron-LM 285068c8) without torchvision.

``megatron.training`` imports one name from it, only for ``--vision-pretraining``.
"""

from __future__ import annotations

from typing import Any


def compute_feature_bank(*_: Any, **__: Any) -> None:
    """Reject the pretraining of vision models, which requires torchvision.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("--vision-pretraining requires the package torchvision, which is not installed")
