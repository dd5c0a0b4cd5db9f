"""Every environment variable and every extra flag of the plug-in, once, with its help text.

Nothing else in the package reads ``os.environ`` for a ``MEGATRON_NPU_*`` name; ``check`` refuses a name that
is not here, which would otherwise do nothing, silently. (Torch's entry point, outside the package, looks at
``MEGATRON_NPU_AUTOLOAD`` itself: importing the package is what that may forbid.)
"""

from __future__ import annotations

import argparse
import difflib
import os
from dataclasses import dataclass

from megatron_npu.arg_parser import whole
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
KEEP_MEMORY = Variable(
    "MEGATRON_NPU_KEEP_MEMORY",
    "1",
    "On a cpu: keep freed memory for the next tensors instead of giving it back to the system.",
    ("0", "1"),
)
VERIFY = Variable(
    "MEGATRON_NPU_VERIFY",
    "",
    "Operations to compare with their reference at every call, forward and backward: names such as "
    "attention,norm separated by commas, or all. Slow; for debugging of precision.",
)
MEGATRON_PATH = Variable(
    "MEGATRON_LM_PATH",
    "",
    "The Megatron checkout to use; also names the one that is meant when there are two.",
)

# The simulated Ascend (megatron_npu/sim). These modules run before torch in every process of a simulation.
SIM = Variable(
    "MEGATRON_NPU_SIM", "0", "Set by `megatron-npu sim`: this process has simulated NPUs.", ("0", "1")
)
SIM_SITE = Variable(
    "MEGATRON_NPU_SIM_SITE",
    "",
    "Directory with an unpacked torch_npu wheel (default: downloaded into the cache).",
)
SIM_CACHE = Variable(
    "MEGATRON_NPU_SIM_CACHE",
    "",
    "Where the simulator keeps the wheel and the compiled shim (default: the user's cache directory).",
)
SIM_DEVICES = Variable("MEGATRON_NPU_SIM_DEVICES", "8", "Number of simulated NPUs that a process sees.")
SIM_SOC = Variable(
    "MEGATRON_NPU_SIM_SOC", "Ascend910B2", "The chip that is simulated; torch_npu chooses code paths by it."
)
SIM_MEMORY = Variable(
    "MEGATRON_NPU_SIM_MEMORY",
    "64G",
    "Memory of each simulated NPU: bytes, or a number with K, M, G. Allocating more is out-of-memory.",
)
SIM_MEMCHECK = Variable(
    "MEGATRON_NPU_SIM_MEMCHECK",
    "0",
    "Fill fresh device memory with NaN, so that reading what nobody wrote shows.",
    ("0", "1"),
)
SIM_REPORT = Variable(
    "MEGATRON_NPU_SIM_REPORT",
    "",
    "JSON file for the counters, written when a process ends; under torchrun one file per rank.",
)
SIM_VERBOSE = Variable(
    "MEGATRON_NPU_SIM_VERBOSE", "0", "Print calls of CANN functions that nobody wrote out.", ("0", "1")
)
SIM_HCCL_TIMEOUT = Variable(
    "MEGATRON_NPU_SIM_HCCL_TIMEOUT", "300", "Seconds after which a simulated collective gives up."
)
SIM_HCCL_DELAY = Variable(
    "MEGATRON_NPU_SIM_HCCL_DELAY", "0", "Microseconds by which every collective is late: shows missing waits."
)

VARIABLES = tuple(value for value in list(globals().values()) if isinstance(value, Variable))


def check() -> None:
    """Check every ``MEGATRON_NPU_*`` variable that is set, before any of them is needed.

    Raises:
        UsageError: there is no such variable, or its value is none that it may have.
    """
    known = [variable.name for variable in VARIABLES]
    for name in os.environ:
        if name.startswith("MEGATRON_NPU_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1) or known
            raise UsageError(
                f"{name}, which is no setting", " or ".join(near), f"Correct it or unset {name}."
            )
    for variable in VARIABLES:
        variable.get()
    verified_operations()
    simulator_values()


# What MEGATRON_NPU_VERIFY may name: the operations of megatron_npu/ops and their groups. Written out, as
# settings are checked where nothing has been imported that knows them.
OPERATIONS = """
    activation bias_gelu geglu swiglu
    adam sgd
    attention attention_part attention_part_backward
    dropout bias_dropout_add
    embedding vocab_parallel_embedding
    grouped_matmul grouped_matmul_weight_gradient
    norm layer_norm rms_norm
    rotary
    softmax scale_mask_softmax
""".split()


def verified_operations() -> frozenset[str]:
    """Return the names in ``MEGATRON_NPU_VERIFY``.

    Raises:
        UsageError: one of them is neither an operation nor a group of operations, nor ``all``.
    """
    names = frozenset(name.strip() for name in VERIFY.get().split(",") if name.strip())
    unknown = sorted(names - {"all", *OPERATIONS})
    if unknown:
        raise UsageError(
            f"{VERIFY.name}={','.join(sorted(names))}",
            f"all, or names among {', '.join(sorted(OPERATIONS))}",
            f"Correct or remove {', '.join(unknown)}.",
        )
    return names


# The chips up to the 910 series that torch_npu 2.13 tells apart, from the names in its library.
CHIPS = """
    Ascend310B1 Ascend310B2 Ascend310B3 Ascend310B4
    Ascend310P1 Ascend310P2 Ascend310P3 Ascend310P4 Ascend310P5 Ascend310P7
    Ascend910A Ascend910PremiumA Ascend910ProA Ascend910ProB
    Ascend910B1 Ascend910B2 Ascend910B2C Ascend910B3 Ascend910B4 Ascend910B4-1
    Ascend910_9362 Ascend910_9363 Ascend910_9372 Ascend910_9381 Ascend910_9382 Ascend910_9391 Ascend910_9392
""".split()


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def simulator_values() -> dict[str, str]:
    """Return what the simulator's C++ side is told: short name -> value (see csrc/runtime.h, ``setting``).

    Raises:
        UsageError: a number is none, or not positive where it must be; no such chip.
    """
    return {
        "devices": str(_count(SIM_DEVICES, 1, 64)),
        "soc": _chip(),
        "memory": str(_bytes(SIM_MEMORY)),
        "memcheck": SIM_MEMCHECK.get(),
        "verbose": SIM_VERBOSE.get(),
        "hccl_timeout": str(_count(SIM_HCCL_TIMEOUT, 1)),
        "hccl_delay": str(_count(SIM_HCCL_DELAY, 0)),
    }


def _chip() -> str:
    name = SIM_SOC.get()
    if name not in CHIPS:
        near = difflib.get_close_matches(name, CHIPS, n=3) or CHIPS
        raise UsageError(f"{SIM_SOC.name}={name}", " or ".join(near), f"Default: {SIM_SOC.default}.")
    return name


def _count(variable: Variable, least: int, most: int | None = None) -> int:
    value = variable.get()
    if not value.isdecimal() or int(value) < least or (most is not None and int(value) > most):
        admitted = f"from {least} on" if most is None else f"from {least} to {most}"
        raise UsageError(
            f"{variable.name}={value}", f"a whole number {admitted}", f"Default: {variable.default}."
        )
    return int(value)


def _bytes(variable: Variable) -> int:
    value = variable.get().upper().removesuffix("B")
    number, unit = (value[:-1], value[-1]) if value[-1:] in _UNITS and value else (value, "")
    if not number.isdecimal() or not int(number):
        raise UsageError(
            f"{variable.name}={variable.get()}",
            "bytes, or a number with K, M or G",
            f"Default: {variable.default}.",
        )
    return int(number) * _UNITS[unit]


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

    def take(self, args: argparse.Namespace) -> None:
        """Take the values of the parsed flags that ``add_attention_flags`` declared."""
        self.pre_tokens, self.next_tokens = args.pre_tokens, args.next_tokens
        self.shape_order = args.shape_order


ATTENTION = AttentionOptions()


def add_attention_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the extra flags: both spellings, Megatron-LM's users write ``tockens``."""
    add = parser.add_argument_group(title="fused attention").add_argument
    add(
        "--pre-tockens",
        "--pre-tokens",
        type=whole,
        dest="pre_tokens",
        metavar="P",
        help="query i sees keys from i - P on (default: all)",
    )
    add(
        "--next-tockens",
        "--next-tokens",
        type=whole,
        dest="next_tokens",
        metavar="N",
        help="query i sees keys up to i + N, the causal mask still holding (default: all)",
    )
    add(
        "--shape-order",
        choices=["SBH", "BSH"],
        default="SBH",
        help="layout given to the fused attention; the results are the same",
    )
