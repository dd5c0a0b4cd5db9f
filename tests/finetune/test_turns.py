"""One rank tokenizes, and the others read what it has made."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_npu.finetune.data.turns import first_alone


def test_the_first_is_alone_and_the_others_are_together(tmp_path: Path) -> None:
    inside, most, seen = 0, 0, []
    count, meeting = threading.Lock(), threading.Barrier(3)

    def enter() -> None:
        nonlocal inside, most
        meeting.wait()
        with first_alone(tmp_path / "cache" / "x.lock"):
            with count:
                inside += 1
                seen.append(inside)
                first = len(seen) == 1
                most = max(most, inside)
            time.sleep(0.3 if first else 0.6)
            with count:
                inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1, 1, 2]  # nobody comes in beside the first one
    assert most == 2


def test_an_error_of_the_first_lets_the_next_one_in(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"), first_alone(tmp_path / "x.lock"):
            raise ValueError("wrong")


def test_two_ranks_tokenize_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    library = pytest.importorskip("datasets")
    from megatron_npu.finetune.tasks.causal_lm import CausalLM
    from tests.finetune import tasks_data

    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    args = tasks_data.parsed(tasks_data.write(tmp_path, "causal_lm"))
    args.world_size = 2
    times: dict[int, list[float]] = {}  # of each rank, when it begins and ends a part
    real = CausalLM.encoded

    def slow(self: CausalLM, rows: Any, part: str) -> Any:
        own = times.setdefault(id(self), [])
        own.append(time.monotonic())
        time.sleep(0.5)
        try:
            return real(self, rows, part)
        finally:
            own.append(time.monotonic())

    monkeypatch.setattr(CausalLM, "encoded", slow)
    meeting, files = threading.Barrier(2), []

    def rank() -> None:
        task = CausalLM(SimpleNamespace(args=args))
        assert task.longest == 16  # and what it takes to know it is loaded
        meeting.wait()
        # not the cached property, which lets one thread of a process in at a time before Python 3.12
        (file,) = CausalLM.examples.func(task)["train"].cache_files
        files.append((file["filename"], os.stat(file["filename"]).st_ino))

    ranks = [threading.Thread(target=rank) for _ in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    # two parts each, one rank after the other; and nobody has written the first one's file again
    first, second = sorted(times.values())
    assert len(first) == len(second) == 4
    assert first[-1] <= second[0]
    assert len(files) == 2
    assert files[0] == files[1]
