"""A table for ``plan --bench`` that is not one."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.planning import calibration


@pytest.mark.parametrize("content", ["[" * 200_000, '{"device": ' + "9" * 5000 + "}", "[]", "{}"])
def test_a_file_that_is_no_table_is_told_in_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="is not a JSON file written by"):
        calibration.Calibration.of(path, "cuda", None, 8)
