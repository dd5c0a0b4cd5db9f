"""Which address a machine is reached at, and whether others are reached from here."""

from __future__ import annotations

import socket

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.watchdog import network


@pytest.mark.parametrize(
    ("address", "private"),
    [("127.0.1.1", True), ("::1", True), ("fe80::1%eth0", True), ("0.0.0.0", True), ("10.77.0.1", False)],
    ids=["debian", "six", "link", "any", "network"],
)
def test_which_addresses_no_other_machine_reaches(address, private) -> None:
    assert network.is_private_to_the_machine(address) is private


def test_an_interface_that_is_not_there_is_named_with_those_that_are(monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(
        UsageError,
        match=r"GLOO_SOCKET_IFNAME is set to none0, which is not an interface .*"
        r"the interfaces with an address are: ",
    ):
        network.own_address()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert network.own_address() == "127.0.0.1"


def test_who_is_not_reached_is_told_with_why() -> None:
    with network.listening("127.0.0.1") as ear, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        places = {
            "reached": ("127.0.0.1", ear.getsockname()[1]),
            "refused": ("127.0.0.1", closed.getsockname()[1]),
            "no way": ("255.255.255.255", 9),  # known at once, without a packet
        }
        found = network.unreached(places, 5.0)
    assert found.keys() == {"refused", "no way"}
    assert found["refused"] == "Connection refused"


def test_one_that_does_not_answer_is_given_up() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        place = full.getsockname()
        with socket.socket() as first, socket.socket() as second:
            for each in (first, second):
                each.setblocking(False)
                each.connect_ex(place)
            assert network.unreached({"full": place}, 0.2) == {"full": "no answer within 0 s"}
