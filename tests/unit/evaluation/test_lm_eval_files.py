"""Where lm-eval cannot write its results, or would read a stranger's cache, the command says so."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from megatron_npu.evaluation import harness, lm_eval_files


@pytest.fixture
def lm_eval(monkeypatch):
    """Return a setter of what lm-eval does in the place of an evaluation."""

    def does(work):
        contents = {
            "lm_eval": {},
            "lm_eval.models": {},
            "lm_eval.api": {},
            "lm_eval.__main__": {"cli_evaluate": work},
            "lm_eval.api.registry": {"model_registry": {harness.MODEL: None}},
        }
        for name, content in contents.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)

    monkeypatch.setattr(harness, "is_installed", lambda name: True)
    monkeypatch.setattr(sys, "argv", [])
    return does


def evaluate(place: Path | str) -> int:
    return cli.main(["evaluate", "--model", "dummy", "--tasks", "mine", "--output_path", str(place)])


@pytest.mark.parametrize("kind", ["a file", "a link into nowhere", "proc"])
def test_a_place_that_takes_no_results_is_refused_first(kind, lm_eval, tmp_path, capsys):
    place = Path("/proc/nothing/x") if kind == "proc" else tmp_path / "place"
    if kind == "a file":
        place.write_text("")
    elif kind == "a link into nowhere":
        place.symlink_to(tmp_path / "gone")
    lm_eval(lambda: pytest.fail("it has begun"))
    assert evaluate(place) == 2
    assert f"--output_path {place}: " in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, '{"results": {"mi', '{"results": {}}'], ids=str)
def test_results_that_are_lost_are_an_error(content, lm_eval, tmp_path, capsys):
    """lm-eval catches whatever its write raises, and ends well."""

    def work():
        if content is not None:
            (tmp_path / "out" / "dummy").mkdir(parents=True)
            (tmp_path / "out" / "dummy" / "results_now.json").write_text(content)

    lm_eval(work)
    whole = content is not None and content.endswith("}}")
    assert evaluate(tmp_path / "out") == (0 if whole else 1)
    told = capsys.readouterr().err
    assert ("is incomplete" in told) == (content is not None and not whole)
    assert ("no results were written" in told) == (content is None)


def test_results_of_a_run_before_do_not_count(tmp_path):
    old = tmp_path / "mine_then.json"
    old.write_text(json.dumps({}))
    os.utime(old, (1, 1))
    assert "no results" in lm_eval_files.why_lost(tmp_path / "mine.json", time.time() - 60)
    (tmp_path / "mine_now.json").write_text("{}")
    assert not lm_eval_files.why_lost(tmp_path / "mine.json", time.time() - 60)


@pytest.mark.parametrize("kind", ["database", "requests"])
def test_a_cache_that_others_can_write_is_refused(kind, tmp_path, monkeypatch):
    if kind == "database":
        cache = tmp_path / "cache_rank0.db"
    else:
        cache = tmp_path / "requests.pickle"
        monkeypatch.setenv("LM_HARNESS_CACHE_PATH", str(tmp_path))
    cache.write_bytes(b"")
    asked = lm_eval_files.given(["--use_cache", str(tmp_path / "cache"), "--limit", "3"])
    tmp_path.chmod(0o755)
    for mode, others in ((0o644, ""), (0o664, f"group {cache.stat().st_gid}"), (0o666, "anyone")):
        cache.chmod(mode)
        if not others:
            lm_eval_files.require(asked)
            continue
        with pytest.raises(UsageError, match=f"the cache {cache} can be written by {others}"):
            lm_eval_files.require(asked)
