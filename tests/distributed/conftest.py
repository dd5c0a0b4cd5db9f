"""The dataset of the tiny runs."""

from tests.end_to_end.conftest import dataset

__all__ = ["dataset"]
