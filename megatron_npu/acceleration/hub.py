"""The hub of Hugging Face where no way leads to it: its cache at once, not after half a minute."""

from __future__ import annotations

import importlib
import logging
import socket
import sys
import urllib.request
from argparse import Namespace
from pathlib import Path
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)


def ask_nobody_who_is_not_there(args: Namespace) -> None:
    """Look for models and data sets in the hub's cache alone, where the hub's host has no address.

    Otherwise each rank asks for each file six times (huggingface_hub 1.x), waits half a minute over it and
    prints two lines each time. Nobody is asked where a run names folders and files alone, and a proxy may
    know addresses that this machine does not.

    Args:
        args: ``pretrained_model_name_or_path``, ``data_path`` and ``task``.
    """
    names = [args.pretrained_model_name_or_path]
    if args.task != "pretraining":  # whose data are a prefix of files
        names += [args.data_path] if isinstance(args.data_path, str) else args.data_path or []
    if not any(map(_may_be_of_the_hub, names)) or urllib.request.getproxies():
        return
    try:
        constants = importlib.import_module("huggingface_hub.constants")
    except ImportError:  # the error is that of who needs it
        return
    host = urlsplit(constants.ENDPOINT).hostname
    if constants.HF_HUB_OFFLINE or host is None or _has_an_address(host):
        return
    logger.info("%s has no address here: the hub's cache alone is looked through", host)
    vars(constants)["HF_HUB_OFFLINE"] = True
    if "datasets.config" in sys.modules:  # which took the value when it was imported
        vars(sys.modules["datasets.config"])["HF_HUB_OFFLINE"] = True


def _may_be_of_the_hub(name: str | None) -> bool:
    return bool(name) and not str(name).startswith((".", "/", "~")) and not Path(str(name)).exists()


def _has_an_address(host: str) -> bool:
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True
