"""numpy for upstream modules that read and write index files: no pickle, no half-written file.

It stands in those modules' globals under the name ``np``; every other name is numpy's own.
"""

from __future__ import annotations

from typing import Any

import numpy

from megatron_npu import files


def __getattr__(name: str) -> Any:
    return getattr(numpy, name)


def load(file: Any, *args: Any, **kwargs: Any) -> Any:
    """``numpy.load`` that never unpickles.

    Raises:
        ValueError: the file holds Python objects.
    """
    return numpy.load(file, *args, **{**kwargs, "allow_pickle": False})


def save(file: str, array: Any, **_: Any) -> None:
    """``numpy.save`` under a temporary name that is renamed when the array is complete.

    Raises:
        ValueError: the array holds Python objects.
    """
    name = file if file.endswith(".npy") else file + ".npy"
    with files.writing(name) as stream:
        numpy.save(stream, array, allow_pickle=False)
