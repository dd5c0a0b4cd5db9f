"""What a user reads of an error: after another rank, and after Megatron, have raised it again."""

from __future__ import annotations

import pickle

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
