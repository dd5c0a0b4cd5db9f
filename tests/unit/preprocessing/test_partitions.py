"""``--partitions`` and ``--keep-sequential-samples``: the order of the input, whatever they say.

That Megatron-LM's own tool writes the same bytes where it keeps the order: ``test_command.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.conftest import Vocabulary
from tests.unit.preprocessing.conftest import SAMPLE
from tests.unit.preprocessing.test_command import contents

Write, Run = Callable[..., Path], Callable[..., Path]
TEXTS = ["zero", "", "two", ["three", "", "more"], [], *(f"{n} {SAMPLE[: n * 7]}" for n in range(5, 12))]


def test_the_order_stays(tiny: Vocabulary, corpus_file: Write, preprocess: Run) -> None:
    file = corpus_file({"text": text} for text in TEXTS)
    in_order = contents(preprocess(file, prefix="one"))
    assert (
        contents(preprocess(file, prefix="three", flags=["--partitions", "3", "--workers", "2"])) == in_order
    )
    flags = ["--partitions", "3", "--keep-sequential-samples"]
    assert contents(preprocess(file, prefix="kept", flags=flags)) == in_order
