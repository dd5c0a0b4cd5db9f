"""Stand-in for ``megatron.model.vision.knn_monitor`` (Megatron-LM 285068c8) where torchvision is absent.

``megatron.training`` imports one name from it, for ``--vision-pretraining`` alone.
"""

from __future__ import annotations

from typing import Any


def compute_feature_bank(*_: Any, **__: Any) -> None:
    """Refuse.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("--vision-pretraining needs the package torchvision, which is not installed")
