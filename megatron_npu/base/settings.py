"""Declare all environment variables of this package, with their help texts.

Nothing else in the package reads a ``MEGATRON_NPU_*`` name from ``os.environ``; ``check`` rejects unknown
names, which would otherwise have no effect. (torch's entry point, outside the package, reads
``MEGATRON_NPU_AUTOLOAD`` itself, because it decides whether the package is imported.)
"""

from __future__ import annotations

import ast
import difflib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_npu.base import digits
from megatron_npu.base.arg_parser import Number, Unfit, byte_size, byte_size_or_0, positive, whole
from megatron_npu.base.errors import UsageError, either

VARIABLES: list[Variable] = []
"""All of them, in the order of their declaration."""

# The chips up to the 910 series that torch_npu 2.13 tells apart, from the names in its library.
_CHIPS = (
    *("Ascend310B1", "Ascend310B2", "Ascend310B3", "Ascend310B4"),
    *("Ascend310P1", "Ascend310P2", "Ascend310P3", "Ascend310P4", "Ascend310P5", "Ascend310P7"),
    *("Ascend910A", "Ascend910PremiumA", "Ascend910ProA", "Ascend910ProB"),
    *("Ascend910B1", "Ascend910B2", "Ascend910B2C", "Ascend910B3", "Ascend910B4", "Ascend910B4-1"),
    *("Ascend910_9362", "Ascend910_9363", "Ascend910_9372"),
    *("Ascend910_9381", "Ascend910_9382", "Ascend910_9391", "Ascend910_9392"),
)

_UNSAFE_TORCH = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_FEW = 8  # more choices than this are not listed where some of them resemble what was given


@dataclass(frozen=True)
class Variable:
    """Describes an environment variable. Declaring one adds it to ``VARIABLES``.

    Attributes:
        name: the name of the variable.
        default: the value used if the variable is unset or empty.
        help: its purpose, in one sentence.
        choices: the accepted values; if empty, all values that ``type`` accepts.
        type: parses the string, like a ``type`` for ``argparse``; raises ``Unfit`` for values that are not
            accepted.
    """

    name: str
    default: str
    help: str
    choices: tuple[str, ...] = ()
    type: Callable[[str], object] = str

    def __post_init__(self) -> None:
        VARIABLES.append(self)

    def get(self) -> str:
        """Return the effective value as a string, after checking that it is valid."""
        self.value()
        return self._text()

    def value(self) -> object:
        """Return the effective value, converted by ``type`` to a number or another type.

        Raises:
            UsageError: the value is not accepted by ``choices`` or ``type``.
        """
        try:
            return self.read(self._text())
        except Unfit as unfit:
            remedy = (
                "Set {0} to one of these, or unset it (default: {1})."
                if self.choices
                else "Correct or unset {0} (default: {1})."
            )
            raise UsageError(f"{self.name} {unfit}", remedy=remedy.format(self.name, self.default)) from None

    def read(self, text: str) -> object:
        """Convert a text to the variable's type.

        This method is also the ``type`` of the flag that sets the variable.

        Raises:
            Unfit: ``choices`` or ``type`` does not accept ``text``.
        """
        if self.choices and text not in self.choices:
            near = difflib.get_close_matches(text, self.choices) if len(self.choices) > _FEW else []
            raise Unfit(text, either(near or self.choices))
        return self.type(text)

    def enabled(self) -> bool:
        """Return True if the value of an on/off variable is on."""
        return self.get() == "1"

    def _text(self) -> str:
        return os.environ.get(self.name, "").strip() or self.default


DEVICE = Variable(
    "MEGATRON_NPU_DEVICE",
    "auto",
    "The device to run on. auto selects the first available one of npu, cuda, cpu.",
    ("auto", "npu", "cuda", "cpu"),
)
AUTOLOAD = Variable(
    "MEGATRON_NPU_AUTOLOAD",
    "1",
    "Install the import hook at `import torch`, so that stock scripts need no edit.",
    ("0", "1"),
)
REDIRECT = Variable(
    "MEGATRON_NPU_REDIRECT",
    "0",
    "For plain PyTorch programs: map torch.cuda, cuda and nccl to this machine's device from "
    "`import torch` on, as `megatron-npu run --redirect` does. Programs that use Megatron do "
    "not need this setting.",
    ("0", "1"),
)
DRIFT = Variable(
    "MEGATRON_NPU_DRIFT",
    "error",
    "What to do if an upstream function differs from the one that a patch was written for.",
    ("error", "warn"),
)
STRICT = Variable(
    "MEGATRON_NPU_STRICT",
    "0",
    "Raise an error if an operation would not use its fused kernel.",
    ("0", "1"),
)
CPU_DEVICES = Variable(
    "MEGATRON_NPU_CPU_DEVICES",
    "auto",
    "Number of devices that `torch.cuda.device_count()` reports on a CPU. auto: the number of "
    "processes that torchrun starts here, else the number of devices in CUDA_VISIBLE_DEVICES, else one.",
    type=lambda text: None if text == "auto" else Number("auto or a positive integer", int, 1)(text),
)
KEEP_MEMORY = Variable(
    "MEGATRON_NPU_KEEP_MEMORY",
    "1",
    "On a CPU and on simulated NPUs: keep freed memory for later tensors instead of returning it to the "
    "system.",
    ("0", "1"),
)
COMPILED = Variable(
    "MEGATRON_NPU_COMPILED",
    "1",
    "Compile this package's C++ code with g++, once: on a CPU its kernels, and on every device the "
    "builder of dataset indices. 0: use only torch's kernels and numpy.",
    ("0", "1"),
)
TRITON = Variable(
    "MEGATRON_NPU_TRITON",
    "1",
    "On cuda: use this package's Triton kernels if triton is installed and the GPU is new "
    "enough. 0: use only torch's kernels.",
    ("0", "1"),
)
SHARE_CORES = Variable(
    "MEGATRON_NPU_SHARE_CORES",
    "1",
    "On a CPU with several ranks: give each rank as many threads as it has cores, unless "
    "OMP_NUM_THREADS is set, and bind it to these cores, unless another program uses the "
    "machine.",
    ("0", "1"),
)
SHARED_MEMORY = Variable(
    "MEGATRON_NPU_SHARED_MEMORY",
    "1",
    "On a CPU: let large collectives of ranks on one machine use shared memory instead of gloo's sockets.",
    ("0", "1"),
)
BACKPORT = Variable(
    "MEGATRON_NPU_BACKPORT",
    "0",
    "Fix the upstream bugs that make results wrong, as later upstream versions do; losses and "
    "gradients then differ from those of the stock version. List: "
    "docs/reference/known-upstream-bugs.md.",
    ("0", "1"),
)
VERIFY = Variable(
    "MEGATRON_NPU_VERIFY",
    "",
    "Operations to compare with their reference in every call, forward and backward: names "
    "such as attention,norm separated by commas, or all. Slow; for debugging numerical "
    "errors.",
)
TRUST_FILES = Variable(
    "MEGATRON_NPU_TRUST_FILES",
    "0",
    "Let megatron-core checkpoints execute the code that they contain, as upstream does; only "
    "for files that you trust.",
    ("0", "1"),
)
TE = Variable(
    "MEGATRON_NPU_TE",
    "none",
    "What to provide under TransformerEngine's names if it is not installed. local: layers of "
    "this package, for libraries and checkpoints that use TransformerEngine's parameter "
    "names; none: nothing, and models that request its layers get Megatron's local ones.",
    ("none", "local"),
)
WATCHDOG = Variable(
    "MEGATRON_NPU_WATCHDOG",
    "300",
    "Maximum number of seconds without a sign of life from a rank, or without progress in the run, before "
    "the watchdog reports it and ends the run; a rank that dies is reported at once. 0: no watchdog.",
    type=whole,
)
RENDEZVOUS_TIMEOUT = Variable(
    "MEGATRON_NPU_RENDEZVOUS_TIMEOUT",
    "auto",
    "With several machines: maximum number of seconds that a machine waits for the run's store at "
    "MASTER_ADDR:MASTER_PORT, and the first machine for the others. auto: 600, or torchrun's --rdzv-conf "
    "timeout if that is longer; 60 if the address seems wrong.",
    type=lambda text: None if text == "auto" else Number("auto or a positive integer", int, 1)(text),
)
MEGATRON_PATH = Variable(
    "MEGATRON_LM_PATH",
    "",
    "The Megatron checkout to use; also selects one if several are found.",
)

# The simulated Ascend (megatron_npu/sim). These modules run before torch in every process of a simulation.
SIM = Variable(
    "MEGATRON_NPU_SIM", "0", "Set by `megatron-npu sim`: this process uses simulated NPUs.", ("0", "1")
)
SIM_SITE = Variable(
    "MEGATRON_NPU_SIM_SITE",
    "",
    "Directory with an unpacked torch_npu wheel (default: downloaded into the cache).",
)
SIM_CACHE = Variable(
    "MEGATRON_NPU_SIM_CACHE",
    "",
    "Folder for the simulator's wheel and compiled library (default: the user's cache directory).",
)
SIM_DEVICES = Variable(
    "MEGATRON_NPU_SIM_DEVICES",
    "8",
    "Number of simulated NPUs that a process can use.",
    type=Number("an integer from 1 to 64", int, 1, 64),
)
SIM_SOC = Variable(
    "MEGATRON_NPU_SIM_SOC",
    "Ascend910B2",
    "Chip to simulate; it determines which code paths torch_npu uses.",
    _CHIPS,
)
SIM_MEMORY = Variable(
    "MEGATRON_NPU_SIM_MEMORY",
    "64G",
    "Memory of each simulated NPU: bytes, or a number with K, M or G. Allocating more raises an "
    "out-of-memory error.",
    type=byte_size,
)
SIM_DRY = Variable(
    "MEGATRON_NPU_SIM_DRY",
    "0",
    "Dry run: reserve the memory of tensors larger than this size (such as 1M) without computing them, and "
    "do not connect to other ranks. Set by `megatron-npu plan`. 0: compute everything.",
    type=byte_size_or_0,
)
SIM_MEMCHECK = Variable(
    "MEGATRON_NPU_SIM_MEMCHECK",
    "0",
    "Fill new device memory with NaN to reveal reads of uninitialized memory.",
    ("0", "1"),
)
SIM_REPORT = Variable(
    "MEGATRON_NPU_SIM_REPORT",
    "",
    "JSON file for the counters, written when the process ends; under torchrun one file per rank.",
)
SIM_VERBOSE = Variable(
    "MEGATRON_NPU_SIM_VERBOSE",
    "0",
    "Print calls to CANN functions that the simulator does not implement.",
    ("0", "1"),
)
SIM_HCCL_TIMEOUT = Variable(
    "MEGATRON_NPU_SIM_HCCL_TIMEOUT",
    "300",
    "Seconds after which a simulated collective fails.",
    type=positive,
)
SIM_HOST = Variable(
    "MEGATRON_NPU_SIM_HOST",
    "",
    "Name of the machine that this process pretends to run on: ranks with different names exchange data "
    "over TCP, as on several machines (default: the machine it runs on).",
)
SIM_HCCL_DELAY = Variable(
    "MEGATRON_NPU_SIM_HCCL_DELAY",
    "0",
    "Microseconds by which each collective is delayed, to reveal missing synchronization.",
    type=whole,
)


def check() -> None:
    """Check every ``MEGATRON_NPU_*`` environment variable that is set, before any of them is used.

    Raises:
        UsageError: a variable is unknown or has a value that is not accepted.
    """
    known = [variable.name for variable in VARIABLES]
    for name in os.environ:
        if name.startswith("MEGATRON_NPU_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1) or known
            raise UsageError(f"unknown setting {name}", remedy=f"Use {either(near)}, or unset {name}.")
    for variable in VARIABLES:
        variable.get()
    verified_operations()
    _torchs_safety_is_on()
    _ranks_are_numbers()


def _ranks_are_numbers() -> None:
    """Check the variables with which launchers number processes, because many functions read them.

    Raises:
        UsageError: a variable is not a non-negative integer.
    """
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        given = os.environ.get(name, "0")
        if digits.number(given) is None:
            raise UsageError(
                f"{name} must be a non-negative integer, but got {given[:40]!r}",
                remedy="Unset it; torchrun sets it for each process that it starts.",
            )


def _torchs_safety_is_on() -> None:
    """Check that torch's environment variables do not allow ``torch.load`` to execute code from files.

    Raises:
        UsageError: the variable is set, but ``MEGATRON_NPU_TRUST_FILES`` does not allow it.
    """
    given = os.environ.get(_UNSAFE_TORCH, "")
    if given.lower() in ("1", "y", "yes", "true") and not TRUST_FILES.enabled():  # as torch reads it
        raise UsageError(
            f"{_UNSAFE_TORCH} is set to {given}, which lets any file that torch loads execute code",
            remedy=f"Unset it (Megatron's checkpoints load without it), or also set {TRUST_FILES.name}=1.",
        )


@functools.cache
def operation_names() -> frozenset[str]:
    """Return the names that ``MEGATRON_NPU_VERIFY`` accepts: the operations in ``megatron_npu/ops``, and
    groups of them.

    The names are read from the source files, because settings are checked before any operation is imported.
    """
    names: set[str] = set()
    for file in sorted((Path(__file__).parents[1] / "ops").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Operation":
                texts = [*node.args[:1], *(word.value for word in node.keywords if word.arg == "group")]
                values = [text.value for text in texts if isinstance(text, ast.Constant)]
                names |= {value for value in values if isinstance(value, str)}
    return frozenset(names)


def verified_operations() -> frozenset[str]:
    """Return the operations that ``MEGATRON_NPU_VERIFY`` selects.

    Raises:
        UsageError: a name is neither an operation, a group of operations, nor ``all``.
    """
    names = frozenset(name.strip() for name in VERIFY.get().split(",") if name.strip())
    unknown = sorted(names - {"all"} - operation_names()) if names - {"all"} else []
    if unknown:
        raise UsageError(
            f"{VERIFY.name} contains unknown operations: {', '.join(unknown)}",
            remedy=f"Correct or remove them. Use all, or names from {', '.join(sorted(operation_names()))}.",
        )
    return names
