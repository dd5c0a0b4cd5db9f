"""Encode text by GPT-2's byte-level BPE with the gigatoken package, with the same ids as ``gpt2_bpe``.

``regex`` and gigatoken use different Unicode tables. The tests encode every character of the planes that
contain letters with both: between letters, digits, spaces and copies of itself.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

if TYPE_CHECKING:
    import numpy as np

    from megatron_npu.data.tokenization.gpt2_bpe import GPT2Tokenizer

TRIED = SpecifierSet("~=0.10.0")


def version() -> str | None:
    """Return the version of the installed gigatoken, or None."""
    try:
        return importlib.metadata.version("gigatoken")
    except importlib.metadata.PackageNotFoundError:
        return None


def is_used() -> bool:
    """Return True if the installed gigatoken is a version whose ids were compared with ours."""
    installed = version()
    return installed is not None and installed in TRIED


def said() -> str:
    """Return a log line that names the encoder and, if it is not gigatoken, the reason."""
    if is_used():
        return f"tokenizing for GPT-2 with gigatoken {version()}"
    absent = "it is not installed (pip install 'megatron_npu[fast]')"
    there = f"{version()} is installed" if version() else absent
    return f"tokenizing for GPT-2 without gigatoken ({TRIED}), which is several times as fast: {there}"


def encoder(tokenizer: GPT2Tokenizer) -> Callable[[str], np.ndarray]:
    """Return a function that encodes a UTF-8 text to ids, a uint32 array ``[tokens]``.

    Raises:
        ModuleNotFoundError: gigatoken is not installed.
    """
    import gigatoken

    return gigatoken.Tokenizer.from_json(tokenizer.as_json()).encode
