"""An ``around`` patch is judged by the parameters that it takes itself, and by no others."""

from __future__ import annotations

import functools
import itertools
import linecache
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_npu.patching.own_parameters import conflict, use_of
from tests.conftest import ROOT

OLD = "def f(self, a, b=1, c=2, *, d=3)"
_counter = itertools.count()


def hands_on(original, self, a, b=1, *args, **kwargs):
    return original(self, a, b, *args, **kwargs)


def takes_all_by_name(original, *args, c=2, **kwargs):
    return original(*args, c=c, **kwargs)


def takes_nothing(original, *args, **kwargs):
    return original(*args, **kwargs)


def takes_no_more(original, self, a, b=1):
    return original(self, a, b)


def wants_b(original, self, a, b, *args, **kwargs):
    return original(self, a, b, *args, **kwargs)


def hands_on_names(original, self, a, **kwargs):
    return original(self, a, **kwargs)


def hands_on_positions(original, self, a, *args):
    return original(self, a, *args)


def reads_a_position(original, self, *args, **kwargs):
    c = args[2] if len(args) > 2 else kwargs.get("c")
    return c, original(self, *args, **kwargs)


def reads_a_name(original, self, *args, **kwargs):
    if kwargs.get("c") or "d" in kwargs:
        return None
    return original(self, *args, **kwargs)


def demands_a_name(original, self, *args, **kwargs):
    return original(self, *args, **kwargs), kwargs["c"]


def gives_a_name(original, self, *args, **kwargs):
    return original(self, *args, d=4, **kwargs)


def gives_positions(original, self, a, *args, **kwargs):
    return original(self, a, 7, 8, **kwargs)


def looks_whether_any_is_set(original, self, a, *args, **kwargs):
    return None if any(args) or any(kwargs.values()) else original(self, a, *args, **kwargs)


def takes_what_is_younger(original, self, a, *args, e=None, **kwargs):
    return original(self, a, *args, **kwargs)


class TestNothingThatItTakes:
    """Changes that say nothing to a function that does not take what has changed."""

    @pytest.mark.parametrize(
        ("ours", "new"),
        [
            (hands_on, OLD),
            (hands_on, "def f(self, a, b=1, c=2, new=None, *, d=3)"),
            (hands_on, "def f(self, a, b=1, new=None, c=2, *, d=3)"),
            (hands_on, "def f(self, a, b=1, *, d=3)"),
            (hands_on, "def f(self, a, b=1, c=5, *, d=6, new)"),
            (hands_on, "def f(self, a, b=1, c=2, *rest, d=3, **options)"),
            (hands_on, "def f(self, a, b, c=2, *, d=3)"),  # always given: our default is not asked
            (takes_nothing, "def f(quite, another=1, *, one)"),
            (takes_all_by_name, "def f(self, c=2, a=1, b=1, *, d=3)"),
            (takes_no_more, "def f(self, a, b=1, *, d=3)"),
            (takes_no_more, "def f(self, a, b=1, c=4)"),
            (wants_b, "def f(self, a, b=1, new=5)"),
            (hands_on_names, "def f(self, a, b=1, c=2, new=None, *, d=3, other=None)"),
            (reads_a_position, "def f(self, a, b=1, c=2, new=3, *, d=3)"),
            (reads_a_name, "def f(self, a, c=2, new=None, b=1, *, d=3)"),
            (reads_a_name, "def f(self, a, b=1, *, new, c=2, d=3)"),
            (demands_a_name, "def f(self, a, b=1, c=9, *, d=3)"),
            (gives_a_name, "def f(self, a, d=3)"),
            (gives_positions, "def f(self, a, b=7, c=8, *, new=None)"),
            (looks_whether_any_is_set, "def f(self, a, new=None, *, d=3, other=False)"),
            (takes_what_is_younger, "def f(self, a, b=1, c=2, *, d=3, e=None)"),
        ],
    )
    def test_is_no_conflict(self, ours, new):
        assert conflict(use_of(ours), OLD, new) is None

    def test_an_autograd_function_is_called_by_position(self):
        def forward(original, ctx, x, *args):
            return original(ctx, x, *args)

        use = use_of(forward)
        assert conflict(use, "@staticmethod def f(ctx, x, y)", "@staticmethod def f(ctx, x, y, new)") is None
        assert conflict(use, "@staticmethod def f(ctx, x, y)", "@staticmethod def f(ctx, new, x, y)")


class TestWhatItTakes:
    """Changes of what a function takes, each named."""

    @pytest.mark.parametrize(
        ("ours", "new", "told"),
        [
            (hands_on, "def f(self, a, other=1, c=2, *, d=3)", "other is now at the position of b"),
            (hands_on, "def f(self, b, a=1, c=2, *, d=3)", "b is now at the position of a"),
            (hands_on, "def f(self, new, a, b=1, c=2, *, d=3)", "new is now at the position of a"),
            (hands_on, "def f(self, a, b=7, c=2, *, d=3)", "the default of b changed from 1 to 7"),
            (hands_on, "def f(self, a)", "b can no longer be passed by position"),
            (hands_on, "def f(self, a, *, b=1)", "b can no longer be passed by position"),
            (hands_on, "def f(a, b=1, c=2, *, d=3)", "a is now at the position of self"),
            (hands_on, "@staticmethod def f(self, a, b=1, c=2, *, d=3)", "def f became @staticmethod def f"),
            (hands_on, "async def f(self, a, b=1, c=2, *, d=3)", "def f became async def f"),
            (hands_on, "class f(Base)", "the original is not a single function"),
            (hands_on, "f = ...", "the original is not a single function"),
            (hands_on, f"{OLD} | {OLD}", "the original is not a single function"),
            (takes_all_by_name, "def f(self, a, b=1, *, d=3)", "c was removed"),
            (takes_all_by_name, "def f(self, a, b=1, c=3, *, d=3)", "the default of c changed from 2 to 3"),
            (
                takes_no_more,
                "def f(self, a, b=1, c=2, new=None, *, d=3)",
                "new is new, and our function does",
            ),
            (takes_no_more, "def f(self, a, b=1, c=2, *, d=3, new=4)", "new is new, and our function does"),
            (takes_no_more, "def f(self, a, b=1, c=2, *rest, d=3)", r"the new \*args"),
            (takes_no_more, "def f(self, a, b=1, c=2, *, d=3, **options)", r"the new \*\*kwargs"),
            (wants_b, "def f(self, a=5, b=1, c=2, *, d=3)", "a is now optional"),
            (hands_on_positions, "def f(self, a, b=1, c=2, new=None, *, d=3)", "new is new"),
            (reads_a_position, "def f(self, a, new=0, b=1, c=2, *, d=3)", "new is now at the position of b"),
            (reads_a_position, "def f(self, a, b=1, c=4, *, d=3)", "the default of c changed from 2 to 4"),
            (reads_a_name, "def f(self, a, b=1, *, d=3)", "c was removed"),
            (reads_a_name, "def f(self, a, b=1, c=2, *, d=4)", "the default of d changed from 3 to 4"),
            (demands_a_name, "def f(self, a, b=1, *, d=3)", "c was removed"),
            (gives_a_name, "def f(self, a, b=1, c=2)", "d was removed"),
            (gives_positions, "def f(self, a, b=7, *, c=2)", "c can no longer be passed by position"),
        ],
    )
    def test_is_a_conflict(self, ours, new, told):
        found = conflict(use_of(ours), OLD, new)
        assert found is not None
        assert re.search(told, found), found

    def test_a_default_that_has_come(self):
        assert conflict(use_of(hands_on), "def f(self, a, b)", "def f(self, a, b=1)") == "b is now optional"


def changes_the_rest(original, *args, **kwargs):
    args = args[1:]
    return original(*args, **kwargs)


def gives_the_rest_away(original, *args, **kwargs):
    return original(*args, **kwargs), sorted(kwargs)


def asks_for_names_of_a_table(original, *args, **kwargs):
    return [kwargs.get(name) for name in "cd"], original(*args, **kwargs)


def sets_a_name(original, *args, **kwargs):
    kwargs["c"] = 1
    return original(*args, **kwargs)


@pytest.mark.parametrize(
    "ours",
    [
        changes_the_rest,
        gives_the_rest_away,
        asks_for_names_of_a_table,
        sets_a_name,
        functools.partial(hands_on),
        print,
        lambda original: original,
    ],
    ids=["changes", "gives away", "table", "sets", "partial", "builtin", "lambda"],
)
def test_where_it_cannot_be_told_every_change_counts(ours):
    assert use_of(ours) is None
    told = "the parameters that our function uses cannot be determined"
    assert conflict(None, OLD, OLD.replace("c=2", "c=2, new=None")) == told


def test_the_page_for_maintainers_quotes_what_a_check_prints():
    """Who looks for a message on the page finds it there in the words of the message."""
    page = (ROOT / "docs" / "contributing" / "adding-a-megatron-version.md").read_text()
    text = " ".join(page.split())
    code = ROOT / "megatron_npu" / "patching"
    source = " ".join((code / name).read_text() for name in ("own_parameters.py", "verdicts.py"))
    quoted = re.findall(
        r'against [\d.]+: (\S[^:]+): signature changed|says "([^"]+)"|\("ckpt_manager ([^"]+)"', text
    )
    words = [next(filter(None, each)) for each in quoted]
    assert len(words) == 3
    for each in words:
        assert each in source, each


# --- against Python itself -----------------------------------------------------------------------------

NAMES = st.lists(st.sampled_from("abcdefg"), unique=True, max_size=5)
DEFAULTS = st.lists(st.integers(0, 2), min_size=5, max_size=5)


def parameters(names: list[str], defaults: list[int], required: int) -> str:
    return ", ".join(
        name if number < required else f"{name}={default}"
        for number, (name, default) in enumerate(zip(names, defaults, strict=False))
    )


def function(source: str) -> Any:
    """Return a function whose source ``inspect`` finds, as that of a module."""
    file = f"<function {next(_counter)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space: dict[str, Any] = {}
    exec(compile(source, file, "exec"), space)  # text made here
    return space["f"]


@given(NAMES, DEFAULTS, NAMES, DEFAULTS, st.data())
def test_a_call_means_the_same_where_there_is_no_conflict(old, old_defaults, new, new_defaults, data):
    """Whatever upstream becomes: what its callers give, our function sees under the same names."""
    required = data.draw(st.integers(0, len(old)))
    now_required = data.draw(st.integers(0, len(new)))
    taken = data.draw(st.integers(0, len(old)))
    own = parameters(old[:taken], old_defaults, required)
    shown = ", ".join(f"{name}={name}" for name in old[:taken])
    given_on = ", ".join([*old[:taken], "*args", "**kwargs"])
    ours = function(
        f"def f({', '.join(filter(None, ['original', own, '*args', '**kwargs']))}):\n"
        f"    return dict({shown}), original({given_on})\n"
    )
    signature = f"def f({parameters(new, new_defaults, now_required)})"
    before = f"def f({parameters(old, old_defaults, required)})"
    assume(conflict(use_of(ours), before, signature) is None)
    upstream = function(f"{signature}:\n    return dict({', '.join(f'{name}={name}' for name in new)})\n")
    count = data.draw(st.integers(now_required, len(new)))
    by_position = data.draw(st.integers(0, count))
    values = [f"value {number}" for number in range(count)]
    named = dict(zip(new[by_position:count], values[by_position:], strict=False))
    seen, result = ours(upstream, *values[:by_position], **named)
    assert result == upstream(*values[:by_position], **named)
    assert seen == {name: result[name] for name in old[:taken]}


@given(NAMES, DEFAULTS, st.data())
def test_what_comes_behind_what_it_takes_is_no_conflict(names, defaults, data):
    required = data.draw(st.integers(0, len(names)))
    taken = data.draw(st.integers(0, len(names)))
    own = parameters(names[:taken], defaults, required)
    given_on = ", ".join([*names[:taken], "*args", "**kwargs"])
    ours = function(
        f"def f({', '.join(filter(None, ['original', own, '*args', '**kwargs']))}):\n"
        f"    return original({given_on})\n"
    )
    rest = data.draw(st.permutations(["x=1", "y=2", "z=None"]))
    before = f"def f({parameters(names, defaults, required)})"
    after = f"def f({', '.join(filter(None, [own, *rest]))})"
    assert conflict(use_of(ours), before, after) is None
