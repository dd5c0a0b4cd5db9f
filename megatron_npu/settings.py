"""Every environment variable and every extra flag of the plug-in, once, with its help text.

Nothing else in the package reads ``os.environ`` for a ``MEGATRON_NPU_*`` name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron_npu.errors import UsageError


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, default, admitted values (empty: any) and help text."""

    name: str
    default: str
    help: str
    choices: tuple[str, ...] = ()

    def get(self) -> str:
        """Return the value in force.

        Raises:
            UsageError: the variable is set to something that ``choices`` does not list.
        """
        value = os.environ.get(self.name, "").strip() or self.default
        if self.choices and value not in self.choices:
            raise UsageError(
                f"{self.name}={value}",
                " or ".join(self.choices),
                f"Set {self.name} to one of these or unset it (default: {self.default}).",
            )
        return value

    def enabled(self) -> bool:
        """Return whether an on/off variable is on."""
        return self.get() == "1"


DEVICE = Variable(
    "MEGATRON_NPU_DEVICE",
    "auto",
    "The device to run on. auto takes the first that is there: npu, cuda, cpu.",
    ("auto", "npu", "cuda", "cpu"),
)
AUTOLOAD = Variable(
    "MEGATRON_NPU_AUTOLOAD",
    "1",
    "Arm the import hook at `import torch`, so that stock scripts need no edit.",
    ("0", "1"),
)
DRIFT = Variable(
    "MEGATRON_NPU_DRIFT",
    "error",
    "What to do when an upstream symbol is not the one a patch was written against.",
    ("error", "warn"),
)
STRICT = Variable(
    "MEGATRON_NPU_STRICT",
    "0",
    "Raise an error where an operation would otherwise leave its fused path.",
    ("0", "1"),
)
MEGATRON_PATH = Variable(
    "MEGATRON_LM_PATH",
    "",
    "The Megatron checkout to use; also names the one that is meant when there are two.",
)

VARIABLES = (DEVICE, AUTOLOAD, DRIFT, STRICT, MEGATRON_PATH)


@dataclass
class AttentionOptions:
    """The flags that the plug-in adds to Megatron's own, as set for this process.

    Attributes:
        pre_tokens: ``--pre-tockens``: query i sees key j only if j >= i - pre_tokens. None: no limit.
        next_tokens: ``--next-tockens``: query i sees key j only if j <= i + next_tokens. None: no limit.
        shape_order: ``--shape-order``: layout handed to the fused attention, ``SBH`` or ``BSH``.
    """

    pre_tokens: int | None = None
    next_tokens: int | None = None
    shape_order: str = "SBH"


ATTENTION = AttentionOptions()
