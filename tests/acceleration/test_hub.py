"""A machine without a way to the hub: nobody is asked; one with a way, or a proxy, asks as ever."""

from __future__ import annotations

import socket
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_npu.acceleration import hub

constants = pytest.importorskip("huggingface_hub.constants")
config = pytest.importorskip("datasets.config")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whose address was asked for; nobody has one."""
    found: list[str] = []

    def getaddrinfo(host: str, *_: object) -> None:
        found.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(hub.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example.org")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", False)
    return found


def args(model: object, data: object, task: str = "causal_lm") -> Namespace:
    return Namespace(pretrained_model_name_or_path=model, data_path=data, task=task)


@pytest.mark.parametrize(("model", "data"), [("gpt2", None), (None, "glue"), ("/no/such", ["glue"])])
def test_names_of_a_hub_without_an_address_are_looked_for_in_its_cache(asked, model, data):
    hub.ask_nobody_who_is_not_there(args(model, data))
    assert asked == ["hub.example.org"]
    assert constants.HF_HUB_OFFLINE
    assert config.HF_HUB_OFFLINE


def test_nobody_is_asked_for_folders_and_files(asked, tmp_path: Path):
    hub.ask_nobody_who_is_not_there(args(str(tmp_path), [str(tmp_path), "./not-there"]))
    hub.ask_nobody_who_is_not_there(args(str(tmp_path), "prefix_of_bin_and_idx", task="pretraining"))
    hub.ask_nobody_who_is_not_there(args(None, None))
    assert not asked


def test_a_way_to_the_hub_or_a_proxy_changes_nothing(asked, monkeypatch):
    monkeypatch.setattr(hub.urllib.request, "getproxies", lambda: {"https": "http://proxy:3128"})
    hub.ask_nobody_who_is_not_there(args("gpt2", None))
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
    monkeypatch.setattr(hub.socket, "getaddrinfo", lambda *_: ["an address"])
    hub.ask_nobody_who_is_not_there(args("gpt2", None))
    assert not constants.HF_HUB_OFFLINE
