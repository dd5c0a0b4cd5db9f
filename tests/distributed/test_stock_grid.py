"""A selection of ``stock_grid``: the oldest and the newest stock pretrain_gpt.py, CPU and simulated NPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from tests.conftest import checkout
from tests.distributed.stock_grid import LAYOUTS, Grid, Result
from tests.support.simulated import unavailable

SELECTION = [
    ("0.16.1", "cpu", "tp2-pp2"),
    ("0.16.1", "npu", "tp2-sp"),
    ("0.16.1", "npu", "pp2-interleaved"),
    ("0.16.1", "npu", "bf16-dp2-distributed-optimizer"),
    ("0.12.1", "cpu", "cp2"),
    ("0.12.1", "npu", "tp2-sp"),
]


@pytest.fixture(scope="module")
def grid_of(tmp_path_factory) -> Callable[[str], tuple[Grid, Result]]:
    """Return a function: version -> its grid and the curve of one process on the CPU, made once."""
    made: dict[str, tuple[Grid, Result]] = {}

    def of(version: str) -> tuple[Grid, Result]:
        if version not in made:
            grid = Grid(checkout("megatron_core", version), tmp_path_factory.mktemp("grid"))
            made[version] = grid, grid.run("cpu", "one")
        return made[version]

    return of


@pytest.mark.parametrize(("version", "device", "layout"), SELECTION)
def test_the_curve_is_that_of_one_process_on_the_cpu(grid_of, version, device, layout) -> None:
    if device == "npu" and unavailable():
        pytest.skip(unavailable())
    if version == "0.12.1" and importlib.util.find_spec("einops") is None:
        pytest.skip("upstream's local attention of 0.12 needs einops")
    grid, expected = grid_of(version)
    assert expected.losses[-1] < expected.losses[0] - 0.2, "the run must learn, or curves say nothing"
    assert grid.run(device, layout).deviation(expected) <= LAYOUTS[layout].limit
