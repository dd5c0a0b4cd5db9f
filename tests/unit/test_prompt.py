"""A run may wait for its user: at ``input`` the watchdog sees nobody stand still."""

from __future__ import annotations

import builtins

from megatron_npu.watchdog import place, prompt


def test_input_is_a_wait_for_people(monkeypatch) -> None:
    def read(prompt: object = "", /) -> str:
        return f"{prompt}{place.of_main_thread().outside}"

    monkeypatch.setattr(builtins, "input", read)
    assert not place.of_main_thread().outside
    prompt.make_visible()
    prompt.make_visible()
    assert builtins.input(">>> ") == ">>> True"
    assert not place.of_main_thread().outside
