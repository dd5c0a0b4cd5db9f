"""The import hook: when patches are in place, in whatever order and way the upstream is imported."""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.resources
import importlib.util
import inspect
import pickle
import sys
import threading
import zipfile
from importlib.machinery import SourceFileLoader
from typing import Any

import pytest

from megatron_npu.patching import repair
from tests.unit.patching.conftest import UpstreamTree, forget

GELU = "stockpkg.model:gelu"


@pytest.fixture
def patched(upstream: UpstreamTree) -> UpstreamTree:
    """The upstream, with a wrap of ``gelu`` on record."""

    @upstream.registry.wrap(GELU, why="w")
    def factory(old: Any) -> Any:
        return lambda *args: ("wrapped", old(*args))

    return upstream


WRAPPED = ("wrapped", 2)


def test_in_place_before_a_name_is_taken_by_value(patched: UpstreamTree) -> None:
    engine = patched.engine()
    assert patched.load("user").gelu(1) == WRAPPED
    assert engine.ledger.rows[0].repaired == []
    engine.undo()
    assert patched.load("user").gelu(1) == 2


def test_arming_twice_is_arming_once(patched: UpstreamTree) -> None:
    engine = patched.engine()
    engine.arm()
    assert sum(finder is sys.meta_path[0] for finder in sys.meta_path) == 1
    assert patched.load("model").gelu(1) == WRAPPED


def test_a_namespace_package(patched: UpstreamTree) -> None:
    (patched.root / "stockpkg/__init__.py").unlink()
    importlib.invalidate_caches()
    patched.engine()
    assert patched.load("user").gelu(1) == WRAPPED
    assert getattr(sys.modules["stockpkg"], "__file__", None) is None  # so it was one


def test_submodules_in_any_order(patched: UpstreamTree) -> None:
    patched.write({"stockpkg/__init__.py": "from . import user\nfrom .model import gelu\n"})
    patched.engine()
    assert patched.load("model").gelu is sys.modules["stockpkg"].gelu is patched.load("user").gelu


def test_a_circular_import_is_repaired_and_listed(patched: UpstreamTree) -> None:
    patched.write(
        {
            "stockpkg/model.py": "def gelu(x, bias=1):\n    return x + bias\nimport stockpkg.sibling\n",
            "stockpkg/sibling.py": "from stockpkg.model import gelu as g\n",
        }
    )
    engine = patched.engine()
    patched.load("model")
    sibling = patched.load("sibling")
    assert sibling.g(1) == WRAPPED
    assert engine.ledger.rows[0].repaired == ["stockpkg.sibling.g"]
    engine.undo()
    assert sibling.g(1) == 2


def test_a_late_import_repairs_the_host_and_main_alone(
    patched: UpstreamTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, model = patched.load("user"), patched.load("model")
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "taken", model.gelu, raising=False)
    monkeypatch.setitem(globals(), "outsider", model.gelu)
    engine = patched.engine()
    engine.apply_loaded()
    row = engine.ledger.rows[0]
    assert user.gelu(1) == main.taken(1) == WRAPPED
    assert globals()["outsider"](1) == 2
    assert row.late
    assert sorted(row.repaired) == ["__main__.taken", "stockpkg.user.gelu"]
    engine.undo()
    assert user.gelu(1) == main.taken(1) == 2


def test_equal_constants_of_others_are_not_touched_late(upstream: UpstreamTree) -> None:
    upstream.registry.constant("stockpkg.model:LIMIT", 7, why="w")
    upstream.write({"stockpkg/other.py": "OWN = 3\n"})
    other = upstream.load("other")
    upstream.load("model")
    upstream.engine().apply_loaded()
    assert other.OWN == 3


def test_an_imported_function_is_changed_only_where_the_patch_says(upstream: UpstreamTree) -> None:
    @upstream.registry.replace("stockpkg.user:gelu", why="w")
    def new(x: Any) -> str:
        return "new"

    upstream.write({"stockpkg/third.py": "from stockpkg.model import gelu\n"})
    user, third = upstream.load("user"), upstream.load("third")
    upstream.engine().apply_loaded()
    assert (user.gelu(1), third.gelu(1), upstream.load("model").gelu(1)) == ("new", 2, 2)


def test_an_early_patch_fails_when_late(upstream: UpstreamTree) -> None:
    @upstream.registry.wrap(GELU, why="w", early=True)
    def factory(old: Any) -> Any:
        return lambda *args: "early"

    model = upstream.load("model")
    engine = upstream.engine()
    engine.apply_loaded()
    assert model.gelu(1) == 2
    assert engine.ledger.rows[0].state == "failed"
    assert "imported before" in engine.ledger.rows[0].reason
    forget()
    assert upstream.load("model").gelu(1) == "early"
    assert engine.ledger.rows[0].state == "applied"


def test_armed_in_the_middle_of_a_body(patched: UpstreamTree) -> None:
    """As when the upstream imports torch, whose entry point arms the engine."""
    engine = patched.engine(arm=False)
    sys.modules["stockpkg_arms"] = type(sys)("stockpkg_arms")
    sys.modules["stockpkg_arms"].engine = engine
    source = "import stockpkg_arms\nstockpkg_arms.engine.arm()\nstockpkg_arms.engine.apply_loaded()\n"
    patched.write(
        {
            "stockpkg/model.py": source + "def gelu(x, bias=1):\n    return x + bias\n",
            "stockpkg/user.py": "from stockpkg.model import gelu\n",
        }
    )
    assert patched.load("user").gelu(1) == WRAPPED
    assert not engine.ledger.rows[0].late
    assert type(sys.modules["stockpkg.model"].__spec__) is importlib.machinery.ModuleSpec
    del sys.modules["stockpkg_arms"]


def test_reload_applies_again_once(patched: UpstreamTree) -> None:
    engine = patched.engine()
    user, model = patched.load("user"), patched.load("model")
    before = user.gelu
    importlib.reload(model)
    assert model.gelu(1) == WRAPPED
    assert model.gelu is not before
    engine.undo()
    assert model.gelu(1) == user.gelu(1) == 2


def test_imported_twice(patched: UpstreamTree) -> None:
    engine = patched.engine()
    first = patched.load("model")
    del sys.modules["stockpkg.model"]
    second = patched.load("model")
    assert first is not second
    assert first.gelu(1) == second.gelu(1) == WRAPPED
    engine.undo()
    assert first.gelu(1) == second.gelu(1) == 2


def test_on_first_is_called_once_and_not_by_a_question(patched: UpstreamTree) -> None:
    engine = patched.engine()
    assert importlib.util.find_spec("stockpkg") is not None
    assert patched.first_calls == 0
    assert importlib.util.find_spec("stockpkg_other") is None
    patched.load("user")
    patched.load("model")
    assert patched.first_calls == 1
    assert engine.context is not None


def test_a_name_that_only_begins_like_the_prefix_is_ignored(patched: UpstreamTree) -> None:
    patched.write({"stockpkg_npu.py": ""})
    patched.engine()
    importlib.import_module("stockpkg_npu")
    assert patched.first_calls == 0
    del sys.modules["stockpkg_npu"]


def test_an_exception_of_on_first_reaches_the_user_each_time(patched: UpstreamTree) -> None:
    errors = [RuntimeError("no device"), RuntimeError("still none")]

    def on_first() -> None:
        if errors:
            raise errors.pop(0)

    patched.engine(on_first=on_first)
    with pytest.raises(RuntimeError, match="no device"):
        patched.load("user")
    assert "stockpkg" not in sys.modules
    with pytest.raises(RuntimeError, match="still none"):
        patched.load("user")
    assert patched.load("user").gelu(1) == WRAPPED


def test_what_on_first_imports_itself_is_patched_too(patched: UpstreamTree) -> None:
    engine = patched.engine(on_first=lambda: patched.load("model") and None)
    assert patched.load("user").gelu(1) == WRAPPED
    assert engine.ledger.count("applied") == 1


def test_threads_race_to_the_first_import(patched: UpstreamTree) -> None:
    names = [f"part{number}" for number in range(8)]
    patched.write({f"stockpkg/{name}.py": "from stockpkg.model import gelu\n" for name in names})
    patched.engine()
    barrier, seen = threading.Barrier(len(names)), []

    def work(name: str) -> None:
        barrier.wait()
        seen.append(patched.load(name).gelu(1))

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [WRAPPED] * len(names)
    assert patched.first_calls == 1


def test_modules_appear_while_holders_are_sought(monkeypatch) -> None:
    """The garbage collector may run Python code, and so let another thread import, at any allocation."""
    monkeypatch.setattr(sys, "modules", sys.modules | {f"filler{number}": sys for number in range(5000)})

    def import_one(phase: str, info: dict[str, int]) -> None:
        sys.modules[f"late{len(sys.modules)}"] = sys

    gc.callbacks.append(import_one)
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        assert not list(repair.holders({id(import_one)}, "stockpkg".__eq__))
    finally:
        gc.callbacks.remove(import_one)
        gc.set_threshold(*thresholds)


def test_the_loader_stays_what_it_was(patched: UpstreamTree) -> None:
    patched.write({"stockpkg/data.txt": "text"})
    patched.engine()
    model = patched.load("model")
    loader = model.__spec__.loader
    assert type(loader) is SourceFileLoader
    assert "class Core" in loader.get_source("stockpkg.model")
    assert inspect.getsource(model.Core).startswith("class Core")
    assert importlib.resources.files("stockpkg").joinpath("data.txt").read_text() == "text"
    for copied in (pickle.loads(pickle.dumps(model.__spec__)), copy.deepcopy(model.__spec__)):
        fresh = importlib.util.module_from_spec(copied)
        copied.loader.exec_module(fresh)
        assert fresh.gelu(1) == 2  # a copy is an ordinary loader


def test_from_a_zip_file(patched: UpstreamTree, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = patched.root / "upstream.zip"
    with zipfile.ZipFile(archive, "w") as target:
        for path in (patched.root / "stockpkg").glob("*.py"):
            target.write(path, f"stockpkg/{path.name}")
    monkeypatch.syspath_prepend(str(archive))
    patched.engine()
    assert ".zip" in patched.load("model").__file__
    assert patched.load("user").gelu(1) == WRAPPED


def test_undo_and_apply_take_up_later_records(patched: UpstreamTree) -> None:
    engine = patched.engine()
    model = patched.load("model")
    patched.registry.constant("stockpkg.model:LIMIT", 7, why="w")
    engine.apply_loaded()
    assert (model.gelu(1), model.LIMIT) == (WRAPPED, 3)
    assert [row.state for row in engine.ledger.rows] == ["applied", "pending"]
    engine.undo()
    engine.apply_loaded()
    assert (model.gelu(1), model.LIMIT) == (WRAPPED, 7)
    engine.undo()
    assert (model.gelu(1), model.LIMIT) == (2, 3)


def test_undo_then_apply_again(patched: UpstreamTree) -> None:
    engine = patched.engine()
    user = patched.load("user")
    engine.undo()
    engine.apply_loaded()
    assert user.gelu(1) == WRAPPED
    engine.undo()
    assert user.gelu(1) == 2


def test_disarmed_leaves_imports_alone_and_arming_asks_again(patched: UpstreamTree) -> None:
    engine = patched.engine()
    patched.load("model")
    engine.undo()
    engine.disarm()
    forget()
    assert patched.load("user").gelu(1) == 2
    engine.arm()
    engine.apply_loaded()
    assert patched.load("user").gelu(1) == WRAPPED
    assert patched.first_calls == 2


def test_a_module_that_went_past_the_hook_is_reported(patched: UpstreamTree) -> None:
    engine = patched.engine()
    importlib.import_module("stockpkg")
    spec = importlib.util.spec_from_file_location("stockpkg.model", patched.root / "stockpkg/model.py")
    sys.modules["stockpkg.model"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert engine.ledger.rows[0].reason == "the module was imported before the import hook was installed"


def test_a_function_with_another_home_keeps_it_on_undo(upstream: UpstreamTree) -> None:
    upstream.write({"stockpkg/better.py": "def fast(x, bias=1):\n    return 'fast'\n"})

    @upstream.registry.wrap(GELU, why="w")
    def factory(old: Any) -> Any:
        return upstream.load("better").fast

    engine = upstream.engine()
    better = upstream.load("better")
    user = upstream.load("user")
    assert user.gelu(1) == "fast"
    engine.undo()
    assert better.fast(1) == "fast"
    assert upstream.load("model").gelu(1) == 2


def test_one_new_object_for_two_targets_is_given_back_by_name(upstream: UpstreamTree) -> None:
    upstream.write(
        {"stockpkg/two.py": "def a():\n    return 'a'\n\ndef b():\n    return 'b'\n",
         "stockpkg/takes.py": "from stockpkg.two import a, b\n"}
    )  # fmt: skip

    def same() -> str:
        return "same"

    upstream.registry.constant("stockpkg.two:a", same, why="w")
    upstream.registry.constant("stockpkg.two:b", same, why="w")
    engine = upstream.engine()
    takes = upstream.load("takes")
    assert takes.a() == takes.b() == "same"
    engine.undo()
    assert (takes.a(), takes.b()) == ("a", "b")


def test_a_reload_that_fails_is_not_called_applied(patched: UpstreamTree) -> None:
    engine = patched.engine()
    model = patched.load("model")
    path = patched.root / "stockpkg/model.py"
    path.write_text("raise RuntimeError('broken')\n" + path.read_text())
    with pytest.raises(RuntimeError, match="broken"):
        importlib.reload(model)
    assert engine.ledger.rows[0].state == "failed"
    assert model.gelu(1) == 2


def test_a_module_of_two_names_is_repaired_once(
    patched: UpstreamTree, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The main module of a spawned process goes by ``__main__`` and ``__mp_main__``."""
    user = patched.load("user")
    monkeypatch.setitem(sys.modules, "stockpkg.alias", user)
    engine = patched.engine()
    engine.apply_loaded()
    assert engine.ledger.rows[0].repaired == ["stockpkg.user.gelu"]
    engine.undo()
    assert user.gelu(1) == 2
    assert not caplog.records
