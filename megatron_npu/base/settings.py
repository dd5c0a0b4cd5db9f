"""All environment variables of this package, with their help texts.

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

from megatron_npu.base.arg_parser import Number, Unfit, byte_size, byte_size_or_0, positive, whole
from megatron_npu.base.errors import UsageError

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
    """One environment variable. Declaring one adds it to ``VARIABLES``.

    Attributes:
        name: the name of the variable.
        default: the value if it is unset or empty.
        help: its purpose, in one sentence.
        choices: the accepted values; empty: all that ``type`` accepts.
        type: parses the text, like a ``type`` of ``argparse``; raises ``Unfit`` for values that are not
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
        """Return the effective text, checked by ``value``."""
        self.value()
        return self._text()

    def value(self) -> object:
        """Return the effective text converted by ``type``, for instance to a number.

        Raises:
            UsageError: the value is not accepted by ``choices`` or ``type``.
        """
        try:
            return self.read(self._text())
        except Unfit as unfit:
            remedy = (
                "Set {0} to one of these or unset it (default: {1})." if self.choices else "Default: {1}."
            )
            raise UsageError(
                f"{self.name}={unfit.given}", unfit.expected, remedy.format(self.name, self.default)
            ) from None

    def read(self, text: str) -> object:
        """Return ``text`` converted by ``type``; also used as the ``type`` of the flag that sets the
        variable.

        Raises:
            Unfit: neither ``choices`` nor ``type`` accepts the text.
        """
        if self.choices and text not in self.choices:
            near = difflib.get_close_matches(text, self.choices) if len(self.choices) > _FEW else []
            raise Unfit(text, " or ".join(near or self.choices))
        return self.type(text)

    def enabled(self) -> bool:
        """Return whether an on/off variable is on."""
        return self.get() == "1"

    def _text(self) -> str:
        return os.environ.get(self.name, "").strip() or self.default


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
REDIRECT = Variable(
    "MEGATRON_NPU_REDIRECT",
    "0",
    "For plain PyTorch programs: let torch.cuda, cuda and nccl mean this machine's device from `import "
    "torch` on, as `megatron-npu run --redirect` does. A program of Megatron needs no setting.",
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
CPU_DEVICES = Variable(
    "MEGATRON_NPU_CPU_DEVICES",
    "auto",
    "As how many devices a CPU counts, in `torch.cuda.device_count()`. auto: as many as torchrun starts "
    "processes here, else as many as CUDA_VISIBLE_DEVICES lists, else one.",
    type=lambda text: None if text == "auto" else Number("auto or a whole number from 1 on", int, 1)(text),
)
KEEP_MEMORY = Variable(
    "MEGATRON_NPU_KEEP_MEMORY",
    "1",
    "On a cpu: keep freed memory for the next tensors instead of giving it back to the system.",
    ("0", "1"),
)
COMPILED = Variable(
    "MEGATRON_NPU_COMPILED",
    "1",
    "Compile C++ of our own with g++, once: on a cpu kernels, everywhere the indices of datasets. 0: torch's "
    "kernels and numpy alone.",
    ("0", "1"),
)
TRITON = Variable(
    "MEGATRON_NPU_TRITON",
    "1",
    "On cuda: run Triton kernels of our own where triton is installed and the GPU is new enough for them. 0: "
    "torch's kernels alone.",
    ("0", "1"),
)
SHARE_CORES = Variable(
    "MEGATRON_NPU_SHARE_CORES",
    "1",
    "On a cpu: give each of several ranks as many threads as it has cores, where OMP_NUM_THREADS does not "
    "say, and bind it to them, where nobody else uses the machine.",
    ("0", "1"),
)
SHARED_MEMORY = Variable(
    "MEGATRON_NPU_SHARED_MEMORY",
    "1",
    "On a cpu: let large collectives of ranks on one machine go through memory that they share instead of "
    "gloo's sockets.",
    ("0", "1"),
)
BACKPORT = Variable(
    "MEGATRON_NPU_BACKPORT",
    "0",
    "Cure the bugs of upstream that make its numbers wrong, as its own later versions do; losses and "
    "gradients then differ from those of the stock version. List: docs/reference/known-upstream-bugs.md.",
    ("0", "1"),
)
VERIFY = Variable(
    "MEGATRON_NPU_VERIFY",
    "",
    "Operations to compare with their reference at every call, forward and backward: names such as "
    "attention,norm separated by commas, or all. Slow; for debugging of precision.",
)
TRUST_FILES = Variable(
    "MEGATRON_NPU_TRUST_FILES",
    "0",
    "Let checkpoints of megatron-core run the code that they hold, as upstream does: for your own files.",
    ("0", "1"),
)
TE = Variable(
    "MEGATRON_NPU_TE",
    "none",
    "What is found under TransformerEngine's names where it is not installed. local: layers of this package, "
    "for libraries and checkpoints that name parameters as TransformerEngine does; none: nothing, and who "
    "asks for its layers gets Megatron's local ones.",
    ("none", "local"),
)
WATCHDOG = Variable(
    "MEGATRON_NPU_WATCHDOG",
    "300",
    "Seconds for which a rank may say nothing, or all ranks, or a run of one process, may stand still, until "
    "that is said and the run ends; a rank that dies is named at once. 0: no watchdog.",
    type=whole,
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
SIM_DEVICES = Variable(
    "MEGATRON_NPU_SIM_DEVICES",
    "8",
    "Number of simulated NPUs that a process sees.",
    type=Number("a whole number from 1 to 64", int, 1, 64),
)
SIM_SOC = Variable(
    "MEGATRON_NPU_SIM_SOC",
    "Ascend910B2",
    "The chip that is simulated; torch_npu chooses code paths by it.",
    _CHIPS,
)
SIM_MEMORY = Variable(
    "MEGATRON_NPU_SIM_MEMORY",
    "64G",
    "Memory of each simulated NPU: bytes, or a number with K, M, G. Allocating more is out-of-memory.",
    type=byte_size,
)
SIM_DRY = Variable(
    "MEGATRON_NPU_SIM_DRY",
    "0",
    "A dry run: nothing is computed in tensors above so many bytes (1M, say), whose memory is reserved and "
    "never touched; peers are not there. `megatron-npu plan` sets it. 0: everything is computed.",
    type=byte_size_or_0,
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
    "MEGATRON_NPU_SIM_HCCL_TIMEOUT",
    "300",
    "Seconds after which a simulated collective gives up.",
    type=positive,
)
SIM_HCCL_DELAY = Variable(
    "MEGATRON_NPU_SIM_HCCL_DELAY",
    "0",
    "Microseconds by which every collective is late: shows missing waits.",
    type=whole,
)


def check() -> None:
    """Check every ``MEGATRON_NPU_*`` variable that is set, before any of them is used.

    Raises:
        UsageError: a variable is unknown or has a value that is not accepted.
    """
    known = [variable.name for variable in VARIABLES]
    for name in os.environ:
        if name.startswith("MEGATRON_NPU_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1) or known
            raise UsageError(
                f"{name}, which is not a setting", " or ".join(near), f"Correct it or unset {name}."
            )
    for variable in VARIABLES:
        variable.get()
    verified_operations()
    _torchs_safety_is_on()


def _torchs_safety_is_on() -> None:
    """Check that torch's own variable does not let ``torch.load`` run code.

    Raises:
        UsageError: it does, and ``MEGATRON_NPU_TRUST_FILES`` does not say that it may.
    """
    given = os.environ.get(_UNSAFE_TORCH, "")
    if given.lower() in ("1", "y", "yes", "true") and not TRUST_FILES.enabled():  # as torch reads it
        raise UsageError(
            f"{_UNSAFE_TORCH}={given}, which lets any file that torch loads execute code",
            f"the variable unset, or {TRUST_FILES.name}=1 in addition",
            f"Unset {_UNSAFE_TORCH}: Megatron's checkpoints load without it.",
        )


@functools.cache
def operation_names() -> frozenset[str]:
    """Return the names that ``MEGATRON_NPU_VERIFY`` accepts: the operations of ``megatron_npu/ops`` and their
    groups.

    They are read from the source files, because settings are checked before any operation is imported.
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
    """Return the operations named in ``MEGATRON_NPU_VERIFY``.

    Raises:
        UsageError: a name is neither an operation, a group of operations, nor ``all``.
    """
    names = frozenset(name.strip() for name in VERIFY.get().split(",") if name.strip())
    unknown = sorted(names - {"all"} - operation_names()) if names - {"all"} else []
    if unknown:
        raise UsageError(
            f"{VERIFY.name}={','.join(sorted(names))}",
            f"all, or names among {', '.join(sorted(operation_names()))}",
            f"Correct or remove {', '.join(unknown)}.",
        )
    return names
