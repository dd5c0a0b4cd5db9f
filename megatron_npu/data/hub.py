"""Ask the hub once whether it answers, before its client asks for each file.

The client waits for over a minute for each file that a hub does not send, and a model has about ten.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

_ATTEMPTS = 2
_COPIES = (("datasets.config", "HF_HUB_OFFLINE"), ("transformers.utils.hub", "_is_offline_mode"))


def use_cache_if_silent(name: str | Path) -> None:
    """Use only the hub's local cache in this process if the hub does not answer, and print a warning.

    The hub is asked once in a process. Each of two attempts waits for HF_HUB_ETAG_TIMEOUT seconds (10 by
    default). Any answer is sufficient.

    Args:
        name: the model or dataset that is needed. If it is a local path, the hub is not asked.
    """
    if not Path(name).exists():
        _ask()


@functools.cache
def _ask() -> None:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return
    reason = ""
    for _ in range(_ATTEMPTS):
        try:
            get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except Exception as error:  # of the HTTP library, which depends on the client's version
            reason = str(error).partition("\n")[0] or type(error).__name__
        else:
            return
    print(
        f"megatron_npu: warning: the hub {constants.ENDPOINT} does not answer ({reason}), so only the local "
        "cache is used. Check the network or HF_ENDPOINT; HF_HUB_OFFLINE=1 avoids the wait.",
        file=sys.stderr,
        flush=True,
    )
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    for module, name in _COPIES:  # made when these were imported
        if hasattr(sys.modules.get(module), name):
            setattr(sys.modules[module], name, True)
