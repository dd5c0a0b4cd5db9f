"""The runner of upstream's own unit tests: it sees every kind of failure, and the baseline holds."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adaptors.megatron_core.upstream_tests import baseline, exclusions, page, trees, worlds
from tests.adaptors.megatron_core.upstream_tests.results import (
    COLLECTION,
    FAILED,
    PASSED,
    SKIPPED,
    FileResult,
    Result,
    merge,
)
from tests.conftest import LONGEST, ROOT, checkout
from tests.support import warm

HERE = Path(__file__).parent
RUNNER = HERE / "run_upstream_tests.py"
QUICK = (
    "fusions/test_torch_softmax.py",
    "test_num_microbatches_calculator.py",
    "tensor_parallel/test_mappings.py",
)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
        "OMP_NUM_THREADS": "1",
    }
    return warm.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )


def test_quick_files_hold_their_baseline():
    tree = checkout("megatron_core", "0.16.1")
    done = run(str(RUNNER), str(tree), "--device=cpu", "--limit=300", *(f"--folder={file}" for file in QUICK))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 regressions, 0 new failures" in done.stdout
    recorded = baseline.Baseline.load("core_v0.16.1", "cpu")
    expected = sum(len(recorded.outcomes(f"tests/unit_tests/{file}")) for file in QUICK)
    assert f"{expected} tests" in done.stdout


FILE = """
import os
import sys
import time

import pytest

RANK = int(os.environ["RANK"])

hung = False

# neither rank is behind when something happens to the other
def meet(name):
    open(f"{name}.{RANK}", "w").close()
    while not os.path.exists(f"{name}.{1 - RANK}"):
        time.sleep(0.01)

@pytest.fixture
def barrier():
    yield
    time.sleep(600 * RANK)

def test_passes():
    meet("passes")

def test_fails_in_one_rank():
    assert RANK != 1

def test_fails_before_a_teardown_that_hangs(barrier):
    assert RANK == 0

def test_after_a_failure():
    meet("after a failure")

def test_hangs_in_one_rank():
    global hung
    hung = True
    time.sleep(600 * RANK)

def test_after_a_hang():
    if not hung:  # but in a new world
        meet("after a hang")

def test_dies():
    os._exit(1)

def test_fails_everywhere():
    assert False, "alike"

# names of core_v0.14.0's and core_v0.16.1's conftest
@pytest.mark.parametrize("name", ["get_oldest_release_and_assets", "download_and_extract_asset"])
def test_fetches_nothing(name):
    module = sys.modules["tests.test_utils.python_scripts.download_unit_tests_dataset"]
    with pytest.raises(RuntimeError, match="not fetched here"):
        getattr(module, name)(assets_dir="/opt/data")

@pytest.mark.experimental
def test_experimental(request):
    assert request.config.option.experimental is True

def test_last(request):
    assert request.config.option.experimental is False
    assert os.getcwd().endswith("cwd")
"""

LEFT = """
import gc
import threading
import time
import weakref

kept = []

class Model:
    pass

class TestObjects:
    def setup_method(self):
        self.model = Model()

    def test_makes_one(self):
        kept.append(weakref.ref(self.model))

    def test_that_of_the_last_is_gone(self):
        gc.collect()
        assert kept[0]() is None

def test_starts_threads_without_an_end():
    for _ in range(150):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    time.sleep(600)

def test_last():
    pass
"""

TWO = """
def test_one():
    pass

def test_two():
    pass
"""

DRIVER = """
import dataclasses, json, sys
from pathlib import Path
from upstream_tests import rank, world
folder = Path(sys.argv[1])
arguments = ("-q", "-p", "no:cacheprovider")
setting = world.Setting(folder, folder, limit=500, grace=2, arguments=arguments)
together = world.run_file(setting, "test_example.py", 2)
alone = world.run_alone(setting, {"test_alone.py": None, "test_chosen.py": ["test_one"]}, jobs=2)
print(json.dumps([dataclasses.asdict(result) for result in (together, *alone)]))
"""


def test_a_world_that_breaks_is_replaced(tmp_path):
    for name in ("tmp", "logs", "cwd"):
        (tmp_path / name).mkdir()
    (tmp_path / "cwd" / "test_example.py").write_text(FILE)
    for name in ("test_alone.py", "test_chosen.py"):
        (tmp_path / "cwd" / name).write_text(TWO)
    done = run("-c", DRIVER, str(tmp_path))
    assert done.returncode == 0, done.stderr
    together, *alone = json.loads(done.stdout)
    ran = {result["file"]: [*result["tests"]] for result in alone}
    assert ran == {"test_alone.py": ["test_one", "test_two"], "test_chosen.py": ["test_one"]}
    assert [result["world"] for result in alone] == [1, 1]
    tests = {name: (test["outcome"], test["text"]) for name, test in together["tests"].items()}
    outcomes = {name: outcome for name, (outcome, _) in tests.items()}
    assert outcomes == {
        "test_passes": PASSED,
        "test_fails_in_one_rank": FAILED,
        "test_fails_before_a_teardown_that_hangs": FAILED,
        "test_after_a_failure": PASSED,
        "test_hangs_in_one_rank": FAILED,
        "test_after_a_hang": PASSED,
        "test_dies": FAILED,
        "test_fails_everywhere": FAILED,
        "test_fetches_nothing[get_oldest_release_and_assets]": PASSED,
        "test_fetches_nothing[download_and_extract_asset]": PASSED,
        "test_experimental": PASSED,
        "test_last": PASSED,
    }
    assert "assert 1 != 1" in tests["test_fails_in_one_rank"][1]
    assert "assert 1 == 0" in tests["test_fails_before_a_teardown_that_hangs"][1]
    assert tests["test_hangs_in_one_rank"][1] == "did not end in every rank: rank 0 ended"
    # Both ranks die; which is seen first is chance.
    assert re.fullmatch(r"did not end in every rank: rank [01] ended", tests["test_dies"][1])


def test_objects_of_a_test_and_its_threads_do_not_add_up(tmp_path):
    for name in ("tmp", "logs", "cwd"):
        (tmp_path / name).mkdir()
    (tmp_path / "cwd" / "test_example.py").write_text(LEFT)
    driver = DRIVER.replace("limit=500", "limit=500, threads=250")
    done = run("-c", driver.replace("(together, *alone)", "[together]"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    [together] = json.loads(done.stdout)
    assert {name: (test["outcome"], test["text"]) for name, test in together["tests"].items()} == {
        "TestObjects::test_makes_one": (PASSED, ""),
        "TestObjects::test_that_of_the_last_is_gone": (PASSED, ""),
        "test_starts_threads_without_an_end": (
            FAILED,
            "did not end in every rank: has more than 250 threads",
        ),
        "test_last": (PASSED, ""),
    }


SELECTION = """
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from upstream_tests import rank
symm_mem.set_backend = lambda name: print("selected", name, "for", file)
dist.is_nccl_available = lambda: False
rank.let_tests_select_nccl()
for file in ("tests/unit_tests/conftest.py", "megatron/core/parameter_group.py"):
    exec(compile('symm_mem.set_backend("NCCL")', f"/checkout/{file}", "exec"))
"""


def test_a_fixture_may_select_nccl_where_there_is_none():
    done = run("-c", SELECTION)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1:] == ["selected NCCL for megatron/core/parameter_group.py"]
    assert "conftest" not in done.stdout


@pytest.mark.parametrize(
    ("ranks", "outcome"),
    [
        ([PASSED, PASSED], PASSED),
        ([SKIPPED, PASSED], PASSED),
        ([SKIPPED, SKIPPED], SKIPPED),
        ([PASSED, FAILED], FAILED),
        ([SKIPPED, FAILED], FAILED),
    ],
)
def test_a_failure_in_one_rank_fails_the_test(ranks, outcome):
    assert merge([Result(rank) for rank in ranks]).outcome == outcome


RULES = [
    exclusions.Rule("needs X", text="no X"),
    exclusions.Rule("absent package y", text="no y here", environment=True),
]


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        (PASSED, Result(PASSED), None),
        (PASSED, Result(FAILED, "wrong"), "regressions"),
        (PASSED, Result(FAILED, "no X"), "regressions"),  # a rule does not excuse what once passed
        (PASSED, Result(SKIPPED, "whatever"), "regressions"),
        (PASSED, Result(FAILED, "no y here"), "incomparable"),
        (PASSED, None, "regressions"),
        (FAILED, Result(FAILED, "wrong"), None),
        (FAILED, Result(PASSED), "gains"),
        (baseline.EXCLUDED, Result(PASSED), "gains"),
        (None, Result(FAILED, "wrong"), "new_failures"),
        (None, Result(FAILED, "no X"), None),
        (None, Result(PASSED), None),
    ],
)
def test_comparison(before, now, kind):
    entry = {PASSED: ["a"]} if before == PASSED else {before: {"why": ["a"]}} if before else {}
    recorded = baseline.Baseline("tree", "cpu", files={"file": entry})
    result = FileResult("file", 1, 0.0, {} if now is None else {"a": now})
    found = vars(baseline.compare(recorded, [result], RULES))
    assert [name for name, tests in found.items() if "file::a" in tests] == ([kind] if kind else [])


@pytest.fixture(scope="module")
def runner():
    """Return the runner's names; where it looks for modules is put back."""
    path = [*sys.path]
    yield runpy.run_path(str(RUNNER))
    sys.path[:] = path


@pytest.mark.parametrize(
    ("files", "title", "counts"),
    [
        ({}, "new failure: file::a: wrong", "1 tests, 0 regressions, 1 new failures, 0 gains"),
        (
            {"file": {PASSED: ["a"]}},
            "REGRESSION: file::a: failed: wrong",
            "1 tests, 1 regressions, 0 new failures, 0 gains",
        ),
    ],
    ids=["nothing recorded", "recorded"],
)
def test_a_failure_is_a_regression_only_of_what_is_recorded(capsys, runner, files, title, counts):
    recorded = baseline.Baseline("core_v0.14.0", "cpu", files=files)
    result = FileResult("file", 1, 0.0, {"a": Result(FAILED, "wrong")})
    assert runner["report"](recorded, [result], RULES) == 1
    said = capsys.readouterr().out
    assert said.splitlines()[:2] == [title, counts]
    assert ("nothing is recorded of core_v0.14.0 on cpu" in said) is not bool(files)


def test_a_run_goes_on_where_one_ended(tmp_path, monkeypatch, runner):
    def run(options, checkout, scratch, chosen, rules):
        return [FileResult(file, 1, 0.0, {}) for file in chosen]

    monkeypatch.setitem(runner["gather"].__globals__, "run", run)
    stored = FileResult("tests/unit_tests/test_a.py", 8, 2.0, {"a": Result(PASSED)})
    (tmp_path / "results").mkdir()
    runner["result_path"](tmp_path, stored.file).write_text(json.dumps(dataclasses.asdict(stored)))
    chosen = dict.fromkeys((stored.file, "tests/unit_tests/test_b.py"))
    options = runner["arguments"](["tree", "--resume", f"--scratch={tmp_path}"])
    first, second = runner["gather"](options, tmp_path, tmp_path, chosen, [])
    assert dataclasses.asdict(first) == dataclasses.asdict(stored)
    assert second.file == "tests/unit_tests/test_b.py"
    with pytest.raises(SystemExit):
        runner["arguments"](["tree", "--resume"])


@pytest.mark.parametrize(("text", "kind"), [("no y here", "incomparable"), ("no X", "regressions")])
def test_a_file_that_cannot_be_read_for_want_of_a_package_is_not_judged(text, kind):
    recorded = baseline.Baseline("tree", "cpu", files={"file": {PASSED: ["a", "b"]}})
    result = FileResult("file", 1, 0.0, {COLLECTION: Result(SKIPPED, text)})
    found = baseline.compare(recorded, [result], RULES)
    names = {"incomparable": {f"file::{COLLECTION}"}, "regressions": {"file::a", "file::b"}}
    assert set(found.incomparable) | set(found.regressions) == names[kind]


def test_rules_explain_failures_alone():
    result = FileResult(
        "file", 8, 1.0, {"a": Result(PASSED), "b": Result(FAILED, "no X"), "c": Result(FAILED, "no")}
    )
    entry = baseline.entry(result, RULES, "cpu")
    assert (entry[PASSED], entry[baseline.EXCLUDED], entry[FAILED]) == (
        ["a"],
        {"needs X": ["b"]},
        {"no": ["c"]},
    )


def test_a_second_pass_takes_what_wants_layers_and_counts_for_it():
    rules = exclusions.load()
    [reason, *_] = exclusions.wanting_layers(rules)
    excluded = {reason: ["b", "c"], "another reason": ["d"]}
    first = baseline.Baseline(
        "tree",
        "cpu",
        files={
            "file": {"seconds": 1.0, PASSED: ["a"], baseline.EXCLUDED: excluded},
            "unread": {"seconds": 1.0, baseline.EXCLUDED: {reason: [COLLECTION]}},
            "other": {"seconds": 1.0, PASSED: ["a"]},
        },
    )
    assert first.wanting({reason}) == {"file": ["b", "c"], "unread": None}
    second = baseline.Baseline(
        "tree",
        "cpu",
        te="local",
        files={
            "file": {"ranks": 8, "seconds": 2.0, PASSED: ["b"], FAILED: {"wrong": ["c"]}},
            "unread": {"ranks": 8, "seconds": 2.0, PASSED: ["e", "f"]},
        },
    )
    both = first.with_second_pass(second)
    assert both.outcomes("file") == {"a": PASSED, "b": PASSED, "c": FAILED, "d": baseline.EXCLUDED}
    assert both.outcomes("unread") == {"e": PASSED, "f": PASSED}
    assert both.totals() == {PASSED: 5, FAILED: 1, baseline.EXCLUDED: 1, SKIPPED: 0}
    assert first.totals()[PASSED] == 2, "what was recorded is left as it is"


def test_a_failure_in_the_second_pass_is_not_excused_by_what_the_first_lacks():
    text = "name 'TELinear' is not defined"
    assert exclusions.find(exclusions.load(), "tests/a.py::test", text, "cpu") is not None
    assert exclusions.find(exclusions.load(te="local"), "tests/a.py::test", text, "cpu") is None


def test_barred_tests_do_not_start():
    rule = exclusions.Rule("why", test=r"tests/test_a\.py::test_(b|c)", barred=True, devices=("npu",))
    assert exclusions.barred([rule], "tests/test_a.py", "npu") == {"test_(b|c)": "why"}
    assert exclusions.barred([rule], "tests/test_a.py", "cpu") == {}
    assert exclusions.barred([rule], "tests/test_b.py", "npu") == {}


@pytest.fixture(scope="module")
def said():
    """Every text that the package can print, and its docstrings."""
    files = (ROOT / "megatron_npu").rglob("*.py")
    texts = [node.value for file in files for node in ast.walk(ast.parse(file.read_text())) if is_text(node)]
    return "\n".join(texts)


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize("te", ["absent", "local"])
def test_rules_for_our_errors_know_what_they_say(said, te):
    """Errors are worded anew now and then; a rule for the old words explains nothing."""
    rules = [rule for rule in exclusions.load(te=te) if rule.ours]
    assert rules
    alternatives = [text for rule in rules for text in re.split(r"\|(?![^(]*\))", rule.text)]
    assert [text for text in alternatives if not re.search(text, said)] == []


def test_no_rule_excludes_everything(tmp_path):
    assert exclusions.load()
    wide = tmp_path / "rules.json"
    wide.write_text('[{"reason": "because", "text": ".*"}]')
    with pytest.raises(ValueError, match="because"):
        exclusions.load(wide)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("def test_pure(): pass", 1),
        ("Utils.initialize_model_parallel(1, 1)", 1),
        ("Utils.initialize_model_parallel()", 1),
        ("Utils.initialize_model_parallel(1, 1)\nif Utils.rank == 0: pass", 8),
        ("Utils.initialize_model_parallel(4, 2)", 8),
        ("Utils.initialize_model_parallel(tp_size, 1)", 8),
        ("torch.distributed.barrier()", 8),
        ("from tests.unit_tests.determinism.bit_exact_runner import BitExactRunner", 8),
    ],
)
def test_ranks_of_a_file(tmp_path, text, ranks):
    (tmp_path / "test_a.py").write_text(text)
    assert worlds.size_for(tmp_path, "test_a.py", {}) == ranks
    assert worlds.size_for(tmp_path, "test_a.py", {"test_a.py": {"ranks": 2, "reason": "few"}}) == 2


def test_files_of_megatron_deepspeed():
    tree = checkout("megatron_deepspeed_core", "4efb479d")
    assert trees.name_of(tree) == "megatron_deepspeed_core_4efb479d"
    found = trees.files(tree, None)
    assert {"tests/transformer/test_module.py", "tests/unit_tests/test_utils.py"} <= set(found)
    assert not any("functional_tests" in file for file in found)
    assert trees.files(tree, ["models"]) == [file for file in found if file.startswith("tests/models/")]


def test_a_tree_is_called_by_its_tag():
    assert trees.core_tag("0.16.1") == "core_v0.16.1"
    assert trees.name_of(checkout("megatron_core", "0.19.1")) == "core_v0.19.0"


def test_every_exception_has_a_reason():
    named = json.loads(worlds._NAMED.read_text())
    assert all(entry["reason"] and entry.keys() & {"ranks", "environment"} for entry in named.values())
    given = [file for file, entry in named.items() if "environment" in entry]
    assert given
    assert all(worlds.environment_for(file) == named[file]["environment"] for file in given)
    assert worlds.environment_for("tests/unit_tests/test_basic.py") == {}


def test_the_page_shows_the_baselines():
    assert page.PAGE.read_text() == page.text()


def test_each_file_of_a_tree_is_recorded_or_listed_with_a_reason():
    noted = json.loads(page._UNRECORDED.read_text(encoding="utf-8"))
    for name, left in noted.items():
        one = baseline.Baseline.load(*name.split(" on "))
        assert not left.keys() & one.files.keys(), f"recorded, but listed as missing in {name}"
        assert len(one.files) + len(left) == one.there, f"files of {name} are neither recorded nor listed"
        for file, reason in left.items():
            assert reason
            assert file.removeprefix("tests/unit_tests/") in page.text()
