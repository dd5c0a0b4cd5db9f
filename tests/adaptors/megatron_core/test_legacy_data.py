"""``megatron.legacy.data`` of Megatron-LM's trees: cached indices and REALM's embeddings are data."""

from __future__ import annotations

from pathlib import Path

from tests.support import on_version


def test_what_it_reads_runs_nothing(tmp_path: Path) -> None:
    on_version.run("legacy_data_worker", "0.16.1", str(tmp_path))
