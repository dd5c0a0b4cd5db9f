"""List all redirected names whose results depend on the calling module, with reasons.

torch, Megatron and other packages call the same function for different purposes. Names that are not listed
here return the same result to all callers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


class Callers:
    """Packages and modules that get a different result from a redirected name than other callers do.

    Attributes:
        names: packages (including their submodules) and modules.
        why: why they call the function, and why they get a different result.
    """

    def __init__(self, *names: str, why: str) -> None:
        self.names = names
        self.why = why
        self._prefixes = tuple(f"{name}." for name in names)
        self._folder = ""

    def __contains__(self, module: str) -> bool:
        return f"{module}.".startswith(self._prefixes) or self._in_folder(module)

    def include(self, folder: Path | None) -> None:
        """Add the modules below ``folder`` to this collection of callers.

        None stands for no folder.
        """
        self._folder = f"{folder}{os.sep}" if folder else ""

    def _in_folder(self, module: str) -> bool:
        if not self._folder:
            return False
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        return file.startswith(self._folder) and "site-packages" not in file  # of an environment in there


PROBE_HARDWARE = Callers(
    "torch",
    "triton",
    why=(
        "torch.cuda.is_available, device_count, get_device_*: torch's compiler and launcher use "
        "them to select kernels and get the real values. All others get the values of this "
        "machine's device."
    ),
)
GENERATE_CODE = Callers(
    "torch._inductor",
    "triton",
    why=(
        "torch.cuda.current_device: inductor names its cache after the properties of this device, "
        "and continues without them if torch raises. Not torch._dynamo, which asks for the code "
        "that it compiles."
    ),
)
START_CUDA = Callers(
    "torch.cuda",
    why=(
        "torch.cuda._lazy_init: torch's own functions call it before they use CUDA. Without CUDA "
        "it raises the error that torch's other modules expect; otherwise they would use names "
        "that do not exist."
    ),
)
SEE_CUDA_TENSORS = Callers(
    "megatron",
    "__main__",
    "__mp_main__",  # the main module in a process that it has spawned
    why="Tensor.is_cuda, Tensor.type(): Megatron and scripts ask whether a tensor is on the device. Without "
    "it, expert-parallel all-to-all takes its split sizes from a tensor on the device "
    "(maybe_move_tensor_to_cpu of moe_utils). All others, above all torch itself, mean CUDA.",
)
SEE_HOST_TENSORS = Callers(
    "megatron.core.optimizer.optimizer",
    "megatron.core.inference.sampling.torch_sampling",
    why="Tensor.is_cuda again, on the cpu device only: offload_to_cpu (since 0.16) moves tensors "
    "from the device to the host, and the log-probabilities of sampled tokens (0.19) require a mapping that "
    "is on the host. On this device, all tensors are on the host.",
)
MEAN_THE_HOST_GENERATOR = Callers(
    "megatron",
    why="torch.get_rng_state, set_rng_state, on the cpu device only: Megatron's checkpoints and RNG tracker "
    "mean the host's generator, as opposed to torch.cuda's. Scripts and other packages mean the generator "
    "that torch.rand draws from.",
)
MEAN_THE_DEVICE_GENERATOR = Callers(
    "deepspeed.accelerator",
    why="torch.manual_seed, on the cpu device only: DeepSpeed's accelerator seeds the device with it, as it "
    "does elsewhere. All others seed both generators, as torch does.",
)


def caller() -> str:
    """Return the name of the module that called the function that is now calling this function."""
    return sys._getframe(2).f_globals.get("__name__", "")


# torch._dynamo puts these around torch.manual_seed when it is imported, which may be before or after us
_AROUND_SEEDING = ("torch._compile", "torch._dynamo.eval_frame")


def caller_of_seeding() -> str:
    """Return the name of the module that called ``torch.manual_seed``, ignoring the wrappers of
    torch._dynamo.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _AROUND_SEEDING:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))
