"""Where lm-eval cannot write its results, or would read a stranger's cache, the command says so."""

from __future__ import annotations

import builtins
import errno
import json
import os
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from megatron_npu.evaluation import harness, lm_eval_files, whole_results
from tests.support import processes


@pytest.fixture
def lm_eval(monkeypatch):
    """Return a setter of what lm-eval does in the place of an evaluation."""

    def does(work):
        contents = {
            "lm_eval": {},
            "lm_eval.models": {},
            "lm_eval.api": {},
            "lm_eval.loggers": {"evaluation_tracker": ModuleType("evaluation_tracker")},
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
    assert f"--output_path {place} must be a writable folder" in capsys.readouterr().err


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
    monkeypatch.setattr(files, "_is_private", lambda group: False)
    for mode, others in ((0o644, ""), (0o664, f"group {cache.stat().st_gid}"), (0o666, "anyone")):
        cache.chmod(mode)
        if not others:
            lm_eval_files.require_own_code(asked)
            continue
        with pytest.raises(UsageError, match=f"the cache {cache} can be written by {others}"):
            lm_eval_files.require_own_code(asked)


@pytest.mark.parametrize("words", [["--cache_requests"], ["--cache_requests", "refresh"], ["-C", "run.yaml"]])
@pytest.mark.parametrize("place", ["/proc/nothing", None])
def test_requests_that_cannot_be_cached_are_refused_first(
    words, place, lm_eval, tmp_path, monkeypatch, capsys
):
    """lm-eval caches them in its own package, to which a user of a shared installation may not write."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("cache_requests: {cache_requests: true}\n")
    package = tmp_path / "lm_eval"
    package.mkdir()
    (package / "caching").touch()  # root may write to any folder
    lm_eval(lambda: pytest.fail("it has begun"))
    specification = ModuleSpec("lm_eval", None, is_package=True)
    specification.submodule_search_locations = [str(package)]
    sys.modules["lm_eval"].__spec__ = specification
    monkeypatch.delenv("LM_HARNESS_CACHE_PATH", raising=False)
    if place:
        monkeypatch.setenv("LM_HARNESS_CACHE_PATH", place)
    assert cli.main(["evaluate", "--model", "dummy", "--tasks", "mine", *words]) == 2
    told = capsys.readouterr().err
    there, reason = ("/proc", "No such file") if place else (package / "caching", "Not a directory")
    assert f"a folder with write permission, but {there} cannot be written ({reason}" in told
    assert "Set LM_HARNESS_CACHE_PATH to a folder of your own" in told


@pytest.mark.parametrize("words", [[], ["--cache_requests", "delete"]])
def test_without_requests_to_cache_their_folder_does_not_matter(words, lm_eval, monkeypatch):
    monkeypatch.setenv("LM_HARNESS_CACHE_PATH", "/proc/nothing")
    lm_eval(lambda: 0)
    assert cli.main(["evaluate", "--model", "dummy", "--tasks", "mine", *words]) == 0


TASK = "task: mine\nprocess_docs: !function evil.run\n"
WORDS = {
    "the working directory": (["--tasks", "mine"], "task file mine "),
    "a file": (["-t", "mine/mine.yaml"], "task file mine/mine.yaml "),
    "a pattern": (["--tasks", "other,mine/*.yaml"], "task file mine/mine.yaml "),
    "a folder of tasks": (["--include_path", "mine"], "task file mine "),
    "a run file": (["--config", "mine/run.yaml"], "run file mine/run.yaml "),
    "a folder in a run file": (["--config", "run.yaml"], "task file mine "),
    "before other tasks": (["--tasks", "mine", "--tasks", "other"], "task file mine "),
    "an option in one word with another": (["-wt", "mine"], "task file mine "),
    "an option in one word with two others": (["-sxcmine/cache"], "cache mine/cache_rank0.db "),
    "a cache in a run file": (["-C", "cached.yaml"], "cache mine/cache_rank0.db "),
}


@pytest.mark.parametrize("way", WORDS)
def test_tasks_that_others_can_write_are_refused(way, lm_eval, tmp_path, monkeypatch, capsys):
    """lm-eval executed a function of the folder ``mine`` in the working directory for ``--tasks mine``."""
    pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    texts = {"mine/mine.yaml": TASK, "mine/run.yaml": "tasks: [other]\n", "mine/cache_rank0.db": ""}
    texts |= {"run.yaml": "include_path: mine\n", "cached.yaml": "use_cache: mine/cache\n"}
    for name, text in texts.items():
        Path(name).write_text(text)
        Path(name).chmod(0o666 if name.startswith("mine/") else 0o644)
    ran = []
    lm_eval(lambda: ran.append(way))
    words, told = WORDS[way]
    Path("mine").chmod(0o777)
    assert cli.main(["evaluate", "--model", "dummy", *words]) == 2
    assert f"the {told}can be written by anyone" in capsys.readouterr().err
    for path in (Path("mine"), *Path("mine").iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert cli.main(["evaluate", "--model", "dummy", *words]) == 0
    assert ran == [way]


@pytest.mark.parametrize("way", ["--wandb_args", "--config"])
def test_settings_of_wandb_that_others_can_write_are_refused(way, lm_eval, tmp_path, monkeypatch, capsys):
    """wandb takes the address of its server from the working directory, and sends the account's key to it."""
    pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_DIR", raising=False)
    Path("wandb").mkdir()
    Path("wandb/settings").write_text("[default]\nbase_url = http://example.invalid\n")
    Path("run.yaml").write_text("wandb_args: {project: mine}\n")
    Path("run.yaml").chmod(0o644)
    ran = []
    lm_eval(lambda: ran.append(way))
    words = ["evaluate", "--tasks", "other", way, "run.yaml" if way == "--config" else "project=mine"]
    Path("wandb").chmod(0o777)
    assert cli.main(words) == 2
    assert "--wandb_args reads wandb/settings" in capsys.readouterr().err
    assert not ran
    for path in (Path("wandb"), Path("wandb/settings")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert cli.main(words) == 0
    assert "the server is http://example.invalid" in capsys.readouterr().out
    assert ran == [way]


@pytest.mark.parametrize("name", ["use_cache", "output_path", "include_path", "tasks", "wandb_args"])
@pytest.mark.parametrize("value", ["[one, [two]]", "{one: 2}", "3", "null"])
def test_a_value_of_another_kind_in_a_run_file_is_left_to_lm_eval(name, value, tmp_path):
    pytest.importorskip("yaml")
    run = tmp_path / "run.yaml"
    run.write_text(f"{name}: {value}\n")
    lm_eval_files.require_own_code(lm_eval_files.given(["--config", str(run)]))


def test_a_run_file_of_another_user_is_not_read(tmp_path, monkeypatch):
    """It may be as large, and as nested, as that user likes."""
    run = tmp_path / "run.yaml"
    run.write_text("tasks: mine\n")
    run.chmod(0o666)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("it has been read"))
    with pytest.raises(UsageError, match="run file"):
        lm_eval_files.require_own_code(lm_eval_files.given(["--config", str(run)]))


_RAISES = "def work():\n    raise {}('Tasks not found:\\n nowhere')\n"


@pytest.mark.parametrize("kind", ["ValueError", "TypeError", "KeyError", "FileNotFoundError", "ImportError"])
@pytest.mark.parametrize("module", ["lm_eval.config.evaluate_config", "lm_eval.tasks.manager", "lm_eval.x"])
def test_input_that_lm_eval_rejects_is_one_line(kind, module, lm_eval, capsys):
    space = {"__name__": module}
    exec(_RAISES.format(kind), space)
    lm_eval(space["work"])
    words = ["evaluate", "--tasks", "nowhere"]
    if module == "lm_eval.x":  # which is a fault of the program
        with pytest.raises(vars(builtins)[kind]):
            cli.main(words)
        return
    assert cli.main(words) == 2
    told = capsys.readouterr().err
    assert f"error: lm-eval rejects its arguments or a task ({kind}: " in told
    assert told.count("\n") == 1


def test_a_metric_that_others_can_write_is_refused(lm_eval, tmp_path, monkeypatch, capsys):
    """``evaluate.load("rouge")`` runs the script ``rouge/rouge.py`` of the working directory."""
    monkeypatch.chdir(tmp_path)
    loaded = []
    theirs = ModuleType("evaluate")
    vars(theirs)["load"] = lambda name, *_, **__: loaded.append(name)
    monkeypatch.setitem(sys.modules, "evaluate", theirs)
    lm_eval(lambda: sys.modules["evaluate"].load("rouge"))
    assert cli.main(["evaluate", "--tasks", "other"]) == 0
    assert loaded == ["rouge"]
    Path("rouge").mkdir()
    Path("rouge/rouge.py").write_text("")
    Path("rouge/rouge.py").chmod(0o666)
    with pytest.raises(SystemExit, match="2"):
        sys.modules["evaluate"].load("rouge")
    assert "error: the metric rouge/rouge.py can be written by anyone" in capsys.readouterr().err
    Path("rouge/rouge.py").chmod(0o644)
    sys.modules["evaluate"].load("rouge")
    assert loaded == ["rouge", "rouge"]


@pytest.mark.parametrize("variable", ["HF_MODULES_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
@pytest.mark.parametrize("opened", ["modules", "modules/evaluate_modules/rouge.py"])
def test_a_cache_of_metrics_that_others_can_write_is_refused(variable, opened, tmp_path, monkeypatch):
    """``evaluate`` imports a metric from it where the hub does not answer."""
    for name in ("HF_MODULES_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "huggingface"
    module = home / "modules" / "evaluate_modules" / "rouge.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    places = {"HF_MODULES_CACHE": home / "modules", "HF_HOME": home, "XDG_CACHE_HOME": tmp_path}
    monkeypatch.setenv(variable, str(places[variable]))
    lm_eval_files.require_own_metric("rouge")
    (home / opened).chmod(0o777)
    with pytest.raises(UsageError, match=r"the cache of metrics .*can be written by anyone"):
        lm_eval_files.require_own_metric("rouge")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the case: Python 3.10 has no safe path")
@pytest.mark.parametrize("path", [None, ":", "/nowhere:"])
def test_what_lm_eval_starts_runs_no_module_of_the_working_directory(path, lm_eval, tmp_path, monkeypatch):
    """lm-eval describes the machine with ``python -m pip``, which ran ``pip.py`` of the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("PYTHONPATH", path) if path else monkeypatch.delenv("PYTHONPATH", raising=False)
    Path("platform.py").write_text("open('mark', 'w')\n")
    lm_eval(lambda: processes.run([sys.executable, "-m", "platform"], capture_output=True).returncode)
    assert cli.main(["evaluate", "--model", "dummy", "--tasks", "other"]) == 0
    assert not Path("mark").exists()


_TRACKER = """
from pathlib import Path
from types import ModuleType
def save(folder):
    path = Path(folder) / "model"
    path.mkdir(parents=True, exist_ok=True)
    (path / "results_now.json").write_text("{}", encoding="utf-8")
    with open(path / "samples_mine_now.jsonl", "a", encoding="utf-8") as stream:
        stream.write("one\\n")
"""  # as lm_eval.loggers.evaluation_tracker does


def test_results_are_whole_or_not_there(tmp_path, monkeypatch):
    tracker, kept = ModuleType("tracker"), tmp_path / "model" / "samples_mine_now.jsonl"
    exec(_TRACKER, vars(tracker))
    kept.parent.mkdir()
    kept.write_text("zero\n")
    with whole_results.writing_whole(tracker) as lost:
        tracker.save(tmp_path)
        monkeypatch.setattr(whole_results.files, "sync", _full)
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                tracker.save(tmp_path)
    assert kept.read_text() == "zero\none\n"
    assert len(lost) == 2
    assert lost[0].endswith("results_now.json could not be written: No space left on device")
    assert sorted(path.name for path in kept.parent.iterdir()) == ["results_now.json", kept.name]
    assert "open" not in vars(tracker)


def _full(stream):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_a_killed_run_was_writing_is_removed(tmp_path):
    for name in (
        "model/results_1.json.9999999.partial",
        "mine_1.json.9999999.partial",
        "model/other.partial",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{")
    lm_eval_files.require_place(lm_eval_files.given(["--output_path", str(tmp_path)]))
    assert [path.name for path in tmp_path.rglob("*.partial")] == ["other.partial"]
