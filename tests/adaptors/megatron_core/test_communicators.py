"""The file of --nccl-communicator-config-path without NCCL; with HCCL: tests/sim/overlap_worker.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_npu.adaptors.megatron_core.run import communicators
from megatron_npu.base.errors import UsageError
from megatron_npu.ops import dispatch
from megatron_npu.ops.dispatch import FallbackForbiddenError


def test_options_of_hccl_are_taken_and_those_of_nccl_reported(monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "fallbacks", {})
    given = {"hccl_buffer_size": 32, "hccl_exec_timeout": 60, "is_high_priority_stream": True, "min_ctas": 2}
    assert communicators.hccl_config("tp", given) == {"hccl_buffer_size": 32, "hccl_exec_timeout": 60}
    ((option, reason),) = dispatch.fallbacks
    assert (option, reason) == ("nccl-communicator-config-path", "min_ctas of group tp is an option for NCCL")
    monkeypatch.setenv("MEGATRON_NPU_STRICT", "1")
    with pytest.raises(FallbackForbiddenError, match="Remove min_ctas"):
        communicators.hccl_config("tp", given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hccl_buffer_size": 0}, "hccl_buffer_size of group tp must be an integer of at least 1, but got 0"),
        (
            {"hccl_buffer_size": "auto"},
            "hccl_buffer_size of group tp must be an integer of at least 1, but got 'auto'",
        ),
        ({"hccl_exec_timeout": True}, "hccl_exec_timeout of group tp must be .*, but got True"),
        ({"buffer": 3}, "group tp has the unknown option buffer; the options are hccl_buffer_size"),
    ],
)
def test_what_nobody_has_is_refused(given, said) -> None:
    with pytest.raises(UsageError, match=said):
        communicators.hccl_config("tp", given)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file or directory\\. It must be YAML such as"),
        ("tp: [", "while parsing"),
        ("tp: 32", "must be YAML .* but it contains 'tp: 32'"),
        ("32", "must be YAML .* but it contains '32'"),
    ],
)
def test_a_file_without_groups_is_refused(text, said, tmp_path) -> None:
    path = tmp_path / "groups.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=said):
        communicators.refuse_an_unreadable_file(SimpleNamespace(nccl_communicator_config_path=str(path)))


def test_gloo_has_no_options() -> None:
    assert communicators.get_nccl_options("tp", {}) is None
    assert communicators.get_nccl_options("tp", {"tp": {"hccl_buffer_size": 32}}) is None
