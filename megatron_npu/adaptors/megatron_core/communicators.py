"""Options of each process group's communicator: ``--nccl-communicator-config-path`` where there is no NCCL.

Connects ``parallel_state`` of ``megatron.core``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.decorators import WITHOUT_CUDA, replace
from megatron_npu.devices import hccl
from megatron_npu.errors import UsageError
from megatron_npu.ops import dispatch

logger = logging.getLogger(__name__)

FLAG = "--nccl-communicator-config-path"
OF_NCCL = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")
_BUFFER = "hccl_buffer_size"
# Of HCCL, as torch_npu's ProcessGroupHCCL.Options().hccl_config names them, with the least that is allowed.
OF_HCCL = {_BUFFER: 1, "hccl_exec_timeout": 0, "hccl_op_expansion_mode": 0}
_DEFAULT_BUFFER = 200  # MiB, of each of a communicator's two (documentation of HCCL_BUFFSIZE)
_said: set[str] = set()


@replace(
    "megatron.core.parallel_state:get_nccl_options",
    devices=WITHOUT_CUDA,
    why="torch has ProcessGroupNCCL only where it was built with CUDA; FSDP asks it for streams "
    "of high priority",
)
def get_nccl_options(pg_name: str, nccl_comm_cfgs: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return torch_npu's options of a group, if any are asked for; None elsewhere: gloo has none.

    Args:
        pg_name: upstream's short name of the group, such as ``tp``.
        nccl_comm_cfgs: name -> options, from the file of ``--nccl-communicator-config-path``.

    Raises:
        UsageError: an option that neither HCCL nor NCCL has, or a value that HCCL does not take.
        FallbackForbiddenError: in strict mode, an option of NCCL.
    """
    given = nccl_comm_cfgs.get(pg_name)
    if not given:
        return None
    config = hccl_config(pg_name, given)
    if devices.current().name != "npu":
        return None
    _say_buffer(pg_name, config.get(_BUFFER))
    return hccl.group_options(config, bool(given.get("is_high_priority_stream", False)))


def hccl_config(group: str, given: Mapping[str, Any]) -> dict[str, int]:
    """Return those of a group's options that HCCL has; report those of NCCL.

    Raises:
        UsageError: an option that neither has, or a value that HCCL does not take.
        FallbackForbiddenError: in strict mode, an option of NCCL.
    """
    for name, value in given.items():
        if name in OF_NCCL:
            reason = f"{name} of group {group} is an option of NCCL"
            dispatch.report_fallback(
                FLAG.removeprefix("--"), reason, "is left out in part", f"Leave out {name}"
            )
        elif name in OF_HCCL:
            if not isinstance(value, int) or isinstance(value, bool) or value < OF_HCCL[name]:
                raise UsageError(
                    f"{FLAG}: {name}: {value!r} of group {group}",
                    f"a whole number from {OF_HCCL[name]}",
                    "Correct the file." if name != _BUFFER else "Give MiB, such as 32.",
                )
        elif name != "is_high_priority_stream":
            raise UsageError(
                f"{FLAG}: {name} of group {group}",
                " ".join((*OF_HCCL, "is_high_priority_stream", *OF_NCCL)),
                "Correct the file.",
            )
    return {name: given[name] for name in OF_HCCL if name in given}


def _say_buffer(group: str, mebibytes: int | None) -> None:
    """Log once what a group's communicator takes and would take, in MiB of the device's memory."""
    if mebibytes is None or group in _said:
        return
    _said.add(group)
    usual = os.environ.get("HCCL_BUFFSIZE", "")
    default = int(usual) if usual.isdecimal() else _DEFAULT_BUFFER
    saved = 2 * (default - mebibytes)
    what = f"{saved} MiB less" if saved >= 0 else f"{-saved} MiB more"
    logger.warning(
        "HCCL's buffers of group %s: 2 x %d MiB in place of 2 x %d MiB, %s of the device's memory",
        *(group, mebibytes, default, what),
    )
