"""The dataset of the tiny runs."""

from tests.support.tiny_dataset import dataset

__all__ = ["dataset"]
