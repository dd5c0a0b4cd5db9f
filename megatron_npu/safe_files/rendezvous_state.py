"""Replace pickle in torch's dynamic rendezvous with a reader that constructs only torch's own state.

With ``--standalone`` or ``--rdzv-backend c10d``, torchrun unpickles a value in a store to which every
account of the machine can connect. While the guard is on, that module uses this module in the place of
``pickle``; all other names are pickle's own.
"""

from __future__ import annotations

import datetime
import importlib
import io
import pickle
from types import ModuleType
from typing import Any

from megatron_npu.base.replaced import Replaced
from megatron_npu.safe_files.data_unpickler import DataUnpickler

MODULE = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_STATE = ("_RendezvousState", "_NodeDesc")
_TIMES = {each.__name__: each for each in (datetime.datetime, datetime.timedelta, datetime.timezone)}
_LONGEST = 200  # characters of a reason
_replaced = Replaced()


class _StateUnpickler(DataUnpickler):
    """Unpickler that constructs rendezvous nodes, their times, and the state that contains them."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class with the given name if the state of a rendezvous may contain it.

        Raises:
            UnpicklingError: the value names something else.
        """
        if module == MODULE and name in _STATE:
            return getattr(importlib.import_module(module), name)
        if module == "datetime" and name in _TIMES:
            return _TIMES[name]
        raise pickle.UnpicklingError(
            f"the stored value refers to {module}.{name}, which a rendezvous state must not contain"
        )

    def check_change(self, made: Any) -> None:
        """Check that state is set only on rendezvous objects that this value has created.

        Raises:
            UnpicklingError: ``made`` is something else.
        """
        if type(made).__module__ != MODULE or type(made).__name__ not in _STATE:
            raise pickle.UnpicklingError(
                f"the stored value sets attributes of a {type(made).__name__}, which a rendezvous "
                "state must not do"
            )


def __getattr__(name: str) -> Any:
    return getattr(pickle, name)


def loads(value: bytes) -> Any:
    """Load the state of a rendezvous from bytes.

    Raises:
        RendezvousStateError: torch's error; the value is damaged, or names other classes or functions.
    """
    from torch.distributed.elastic.rendezvous.api import RendezvousStateError

    try:
        state = _StateUnpickler(io.BytesIO(value)).load()
        if type(state).__name__ != _STATE[0]:
            raise pickle.UnpicklingError(
                f"the stored value is a {type(state).__name__} instead of a rendezvous state"
            )
    except Exception as error:  # a broken pickle raises whatever it stumbles over
        reason = (str(error).partition("\n")[0] or type(error).__name__)[:_LONGEST]
        raise RendezvousStateError(
            "the rendezvous state in the run's store was not loaded, because another program has written it: "
            f"{reason}; it must be a state that torch writes. Start the run with --master-addr and "
            "--master-port instead of --standalone or --rdzv-backend c10d, on a machine without accounts "
            "that you do not trust."
        ) from None
    return state


def guard(module: ModuleType) -> None:
    """Make torch's dynamic rendezvous read its state through this module.

    A second call has no effect.
    """
    _replaced.set_once(module, "pickle", importlib.import_module(__name__))


def release() -> None:
    """Restore torch's original pickle reader."""
    _replaced.undo()
