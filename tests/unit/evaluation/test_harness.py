"""The command that runs lm-eval, and what tasks may ask of a text. lm-eval itself is not needed here."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from megatron_npu.evaluation import harness
from megatron_npu.evaluation.gen_kwargs import Wish
from tests.conftest import ROOT


def test_the_entry_point_is_the_one_that_the_command_registers():
    _, _, rest = (
        (ROOT / "pyproject.toml")
        .read_text(encoding="utf-8")
        .partition('[project.entry-points."lm_eval.models"]\n')
    )
    assert rest.splitlines()[0] == f'{harness.MODEL} = "{harness.TARGET}"'
    module, _, name = harness.TARGET.partition(":")
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    assert f'@register_model("{harness.MODEL}")\nclass {name}(' in source


def test_without_lm_eval_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(harness, "is_installed", lambda name: False)
    assert cli.main(["evaluate", "--model", "hf"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        "megatron-npu evaluate: error: lm-eval 0.4.13 or later is required, but it is not installed"
    )
    assert told.count("\n") == 1


@pytest.mark.parametrize("known", [True, False], ids=["a release that reads entry points", "0.4.13"])
def test_the_command_line_is_handed_on(monkeypatch, known):
    registered, seen = {"megatron_npu": "known"} if known else {}, []

    class Registry:
        def __contains__(self, name: str) -> bool:
            return name in registered

        def register(self, name: str, target: str) -> None:
            registered[name] = target

    modules = {
        "lm_eval": {},
        "lm_eval.models": {},
        "lm_eval.api": {},
        "lm_eval.loggers": {"evaluation_tracker": ModuleType("lm_eval.loggers.evaluation_tracker")},
        "lm_eval.__main__": {"cli_evaluate": lambda: seen.append(sys.argv)},
        "lm_eval.api.registry": {"model_registry": Registry()},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(harness, "is_installed", lambda name: True)
    monkeypatch.setattr(sys, "argv", [])
    assert cli.main(["evaluate", "--model", "megatron_npu", "--tasks", "piqa"]) == 0
    assert seen == [["lm_eval", "--model", "megatron_npu", "--tasks", "piqa"]]
    assert registered == {"megatron_npu": "known" if known else harness.TARGET}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, Wish((), 16)),
        ({"until": "a"}, Wish(("a",), 16)),
        ({"until": ["a", "b"], "max_gen_toks": 3, "max_tokens": 4}, Wish(("a", "b"), 3)),
        ({"max_new_tokens": 4, "do_sample": False, "temperature": 0.7, "num_beams": 1}, Wish((), 4)),
        ({"do_sample": True}, Wish((), 16, 1.0)),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9}, Wish((), 16, 0.7, 5, 0.9)),
        ({"do_sample": True, "temperature": 0.5, "top_p": 1.0}, Wish((), 16, 0.5)),
    ],
)
def test_what_a_task_wants_of_a_text(wanted, expected):
    assert Wish.of(wanted, 16) == expected
    assert expected.options(7).greedy == (expected.temperature == 0)


@pytest.mark.parametrize("wanted", [{"num_beams": 4}, {"repetition_penalty": 1.2}, {"stopping": 1}])
def test_what_a_text_cannot_be_is_refused_by_name(wanted):
    with pytest.raises(UsageError, match=next(iter(wanted))):
        Wish.of(wanted, 16)
