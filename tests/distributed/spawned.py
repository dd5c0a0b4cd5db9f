"""Ranks of a test that multiprocessing spawns: one new process each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from tests.conftest import LONGEST


def exit_codes(target: Callable[..., None], world_size: int, *args: Any) -> list[int | None]:
    """Run ``target(rank, *args)`` in ``world_size`` processes; return how each of them ended."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=target, args=(rank, *args)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LONGEST)
    for process in ranks:
        process.kill()  # one that hangs must not outlive the test
        process.join()
    return [process.exitcode for process in ranks]
