"""HCCL of the simulated NPUs behind torch_npu's own process group, against gloo on the same data.

One launch per number of ranks runs all its suites (hccl_worker.py); the tests here report them one by one.
"""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.simulated import Run

HERE = Path(__file__).resolve().parent
ALL = (
    "random_sequence every_type larger_than_the_segment uneven_lists reduction_in_the_order_of_ranks "
    "not_a_number_and_infinity a_thousand_interleavings batches blocking_send_and_receive "
    "objects_and_data_parallel coalesced counters "
    "groups_and_buffers products_that_communicate"
).split()
# what depends on the number of ranks: who sends what to whom, in which order
FEWER = (
    "random_sequence larger_than_the_segment uneven_lists reduction_in_the_order_of_ranks "
    "a_thousand_interleavings groups_and_buffers"
).split()
SUITES = {2: ALL, 4: ALL, 8: FEWER, 16: ["random_sequence", "a_thousand_interleavings"]}
DELAYED = [
    "without_wait_the_data_are_old",
    "other_streams_wait_for_themselves",
    "side_stream_reduces_twice",
]
DELAY = str(2_000_000)  # microseconds


def launch(run: Run, folder: Path, ranks: int, suites: list[str], **environment: str) -> dict[str, list[str]]:
    """Run suites on several ranks; return suite -> what went wrong, one text per rank that complains."""
    program = [str(HERE / "hccl_worker.py"), str(folder), *suites]
    settings = {"MEGATRON_NPU_SIM_HCCL_TIMEOUT": "60", **environment}
    if ranks > 8:  # as many as there are by default
        settings["MEGATRON_NPU_SIM_DEVICES"] = str(ranks)
    done = run("python", str(HERE / "ranks.py"), "--torch", str(ranks), *program, **settings)
    problems: dict[str, list[str]] = {}
    for rank in range(ranks):
        file = folder / f"{rank}.json"
        found = json.loads(file.read_text()) if file.exists() else {}
        for suite in suites:
            text = found.get(suite, f"not reached\n{done.stdout[-4000:]}")
            problems.setdefault(suite, []).extend([f"rank {rank}: {text}"] if text else [])
    return problems


@pytest.fixture(scope="module")
def problems(simulated, tmp_path_factory):
    """Return a function: number of ranks -> the outcome of its launch, made once."""
    known: dict[int, dict[str, list[str]]] = {}

    def of(ranks: int) -> dict[str, list[str]]:
        if ranks not in known:
            folder = tmp_path_factory.mktemp(f"ranks{ranks}")
            known[ranks] = launch(simulated, folder, ranks, SUITES[ranks])
        return known[ranks]

    return of


@pytest.mark.parametrize(("ranks", "suite"), [(ranks, suite) for ranks in SUITES for suite in SUITES[ranks]])
def test_like_gloo(problems, ranks, suite):
    assert not problems(ranks)[suite], problems(ranks)[suite][0]


@pytest.fixture(scope="module")
def delayed(simulated, tmp_path_factory):
    folder = tmp_path_factory.mktemp("delayed")
    return launch(simulated, folder, 2, DELAYED, MEGATRON_NPU_SIM_HCCL_DELAY=DELAY)


@pytest.mark.parametrize("suite", DELAYED)
def test_with_a_delay(delayed, suite):
    assert not delayed[suite], delayed[suite][0]


def test_uneven_lists_in_one_call(simulated, tmp_path):
    suite = "uneven_lists_in_one_call"
    found = launch(simulated, tmp_path, 2, [suite], MEGATRON_NPU_SIM_SOC="Ascend910_9391")
    assert not found[suite], found[suite][0]


def test_sub_communicators_of_the_process_group(simulated, tmp_path):
    """torch_npu can derive the communicators of groups from the world's (HcclCreateSubCommConfig)."""
    outputs: list[str] = []

    def run(*command: str, **environment: str) -> CompletedProcess[str]:
        done = simulated(*command, **environment)
        outputs.append(done.stdout)
        return done

    found = launch(run, tmp_path, 2, ["short_random_sequence"], ROOTINFO_SUBCOMM_ENABLE="1")
    assert not found["short_random_sequence"], found["short_random_sequence"][0]
    assert "Sub-communicator is an internal experimental feature" in outputs[0], (
        "torch_npu took the usual way"
    )
