"""What `doctor --cluster` says of HCCL's ports."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("torch")

from megatron_npu.doctor import cluster


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "HCCL_HOST_SOCKET_PORT_RANGE",
            "60050-60000",
            "HCCL_HOST_SOCKET_PORT_RANGE must be auto, or port ranges such as",
        ),
        ("HCCL_NPU_SOCKET_PORT_RANGE", "61000-61050,x", "but is 61000-61050,x"),
        ("HCCL_IF_BASE_PORT", "65530", "a port from 1024 to 65520"),
    ],
)
def test_a_range_that_is_none_is_named(name, value, line, monkeypatch) -> None:
    monkeypatch.setenv(name, value)
    (fault,) = cluster.wrong_ports("127.0.0.1", uses_hccl=False)
    assert line in fault


def test_ranges_as_cann_takes_them_are_right(monkeypatch) -> None:
    monkeypatch.setenv("HCCL_HOST_SOCKET_PORT_RANGE", "auto")
    monkeypatch.setenv("HCCL_NPU_SOCKET_PORT_RANGE", "61000-61050, 61055")
    assert cluster.wrong_ports("127.0.0.1", uses_hccl=False) == []


def test_a_port_that_is_taken_is_named(monkeypatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = min(taken.getsockname()[1], 65520)
        monkeypatch.setenv("HCCL_IF_BASE_PORT", str(port))
        if port == taken.getsockname()[1]:
            assert f"HCCL's ports {port}" in cluster.wrong_ports("127.0.0.1", uses_hccl=True)[0]
        assert cluster.wrong_ports("127.0.0.1", uses_hccl=False) == []
