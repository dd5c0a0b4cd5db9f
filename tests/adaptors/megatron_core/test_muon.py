"""Muon, Lion and SOAP of megatron-core without Triton, which their package always imports; the driver too."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adaptors.megatron_core.test_versions import EXACT
from tests.conftest import ROOT, on_a_leash
from tests.support import curves, on_version, processes, tiny, warm
from tests.support.curves import Curve, deviation

WORKER = Path(__file__).with_name("muon_worker.py")
INSTALLED = "0.16.1"
UNPACKED = ROOT / "checkouts" / "emerging_optimizers-0.3.0"


def folder() -> Path:
    """Return the folder that holds the package; the test is skipped where there is none."""
    found = importlib.util.find_spec("emerging_optimizers")
    if found is not None and found.origin is not None:
        return Path(found.origin).parents[1]
    if not UNPACKED.is_dir():
        pytest.skip(f"no {UNPACKED.relative_to(ROOT)}: run scripts/get_megatron.sh")
    return UNPACKED


def environment(version: str) -> dict[str, str]:
    """Return an environment with a version of megatron-core, and with the package."""
    found = tiny.environment() if version == INSTALLED else tiny.environment_of(on_version.root_of(version))
    return found | {"PYTHONPATH": os.pathsep.join([found["PYTHONPATH"], str(folder())])}


@pytest.mark.parametrize("version", [INSTALLED, "0.17.1", "0.19.2"])
def test_muon_trains_and_its_first_update_is_that_of_fp64(version, tmp_path) -> None:
    command = [sys.executable, str(WORKER), str(tmp_path / "store")]
    modules = warm.DRIVER if version in on_version.OFTEN else ()
    done = warm.run(command, env=environment(version), modules=modules, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["error"] < 1e-4
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["losses"][-1] < found["losses"][0] / 2


@pytest.mark.parametrize("version", [INSTALLED, "0.19.2"])
def test_two_processes_that_share_the_optimizer_out_are_one(version, tmp_path) -> None:
    """Of 0.16's ``dist_muon``: one of them has the only matrix, the other its bias.

    In the middle they save, in fp32, and go on with an optimizer that has loaded it.
    """
    command, env = warm.ready([sys.executable, str(WORKER)], environment(version), warm.DRIVER)
    options: dict = {"env": env, "stdout": subprocess.PIPE, "text": True}
    one = processes.run([*command, str(tmp_path / "alone")], **options, check=True)
    command = [*command, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], **options) for rank in (0, 1)]
    with on_a_leash(ranks[0]), on_a_leash(ranks[1]):
        lines = [json.loads(process.communicate()[0].splitlines()[-1]) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    assert lines[0]["losses"] == lines[1]["losses"] == json.loads(one.stdout.splitlines()[-1])["losses"]
    assert lines[0]["error"] < 1e-4


@pytest.mark.parametrize(
    ("version", "optimizers", "processes", "npu"),
    [
        ("0.17.1", ["lion"], 1, False),
        ("0.18.2", ["lion", "soap"], 2, False),
        ("0.19.2", ["lion", "soap"], 1, True),
    ],
)
def test_lion_and_soap_train_uncompiled_and_their_first_update_is_that_of_fp64(
    version, optimizers, processes, npu
) -> None:
    """SOAP's of each tensor-parallel rank by itself, as the package has it: it is given no group."""
    path = environment(version)["PYTHONPATH"]
    on_version.run("emerging_worker", version, *optimizers, processes=processes, npu=npu, PYTHONPATH=path)


MUON = "--optimizer muon --muon-nesterov --muon-fp32-matmul-prec highest --lr 2e-2 --eval-iters 0".split()
LAYOUTS = {
    "dp2": "--global-batch-size 4",
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel --muon-tp-mode duplicated",
    "pp2": "--pipeline-model-parallel-size 2",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Curve]:
    """Return the driver's curves with Muon: of one process, its resumption and layouts, from one start."""
    version, place = os.environ.get("TEST_MUON_VERSION", "0.19.2"), tmp_path_factory.mktemp("muon")
    dataset = tiny.write_dataset(place / "numbers")
    flags, env = [*tiny.flags_for(dataset), *EXACT, *MUON], environment(version)
    save = f"--save {place / 'saved'} --load {place / 'saved'}"
    cases = {
        **curves.from_one_start(place / "start", {"one": ""}),
        **{"first": f"{save} --exit-interval 3", "rest": save, "whole": ""},
    }
    curves.run(place / "alone", flags, cases, env=env)
    curves.run(place / "two", [*flags, *curves.begin_with(place / "start")], LAYOUTS, 2, env)
    places = dict.fromkeys(cases, "alone") | dict.fromkeys(LAYOUTS, "two")
    return {name: curves.read(place / folder, name) for name, folder in places.items()}


def test_the_driver_goes_on_with_muon_as_if_never_interrupted(found) -> None:
    halves = [*found["first"].losses(), *found["rest"].losses()]
    assert halves == found["whole"].losses()
    assert len(found["rest"].losses()) == 3
    assert halves[-1] < halves[0] - 0.05


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_with_muon_have_the_curve_of_one(found, layout) -> None:
    for name in ("loss", "grad_norm"):
        assert deviation(found[layout].of(name), found["one"].of(name)) < 1e-3
