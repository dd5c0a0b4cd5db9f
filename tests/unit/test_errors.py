"""What a user reads of an error: after another rank, and after Megatron, have raised it again."""

from __future__ import annotations

import pickle

import pytest

from megatron_npu.base.errors import UsageError

ERROR = UsageError("--fp8 on the cpu device", "bf16", "Leave out --fp8.")


def test_an_error_comes_whole_from_another_rank():
    again = pickle.loads(pickle.dumps(ERROR))
    assert (again.given, again.expected, again.remedy) == (ERROR.given, ERROR.expected, ERROR.remedy)
    assert str(again) == str(ERROR) == "--fp8 on the cpu device; expected bf16. Leave out --fp8."


def test_a_librarys_sentence_gets_no_second_period():
    error = UsageError("megatron-core rejects this model: Heads must divide.", remedy="Change the flags.")
    assert str(error) == "megatron-core rejects this model: Heads must divide. Change the flags."


def test_an_error_made_of_a_whole_message_says_that_message():
    """Megatron's ``build_module`` raises ``type(error)(f"{error} when instantiating ...")``."""
    wrapped = type(ERROR)(f"{ERROR} when instantiating MambaLayer")
    assert str(wrapped) == f"{ERROR} when instantiating MambaLayer"
    assert str(pickle.loads(pickle.dumps(wrapped))) == str(wrapped)


@pytest.mark.parametrize(
    ("quoted", "told"),
    [
        ("\x1b]0;x\x07\x1b[2Jlr", r"\x1b]0;x\x07\x1b[2Jlr"),
        ("a\u202eb\u2066\x9b", r"a\u202eb\u2066\x9b"),
        ("ｖalue\u3000é\tb\nc", "ｖalue\u3000é\tb\nc"),
    ],
)
def test_a_terminal_does_not_act_on_what_a_message_quotes(quoted: str, told: str) -> None:
    """A run file of another user cleared the screen, or wrote what looked like a message."""
    error = UsageError(f"the value is {quoted}", quoted, remedy=quoted)
    assert str(error) == f"the value is {told}; expected {told}. {told}"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_message_is_not_as_long_as_what_it_quotes() -> None:
    error = UsageError("x" * 1_000_000, remedy="Correct it.")
    assert len(str(error)) < 11_000
    assert str(error).endswith("x. Correct it.")
