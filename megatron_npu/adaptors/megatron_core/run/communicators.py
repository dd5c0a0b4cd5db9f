"""Apply ``--nccl-communicator-config-path`` to process groups of backends other than NCCL.

With ``--hccl-group-buffer-adaptive``, also choose the HCCL buffer sizes that the file does not specify.
Patches ``parallel_state`` of ``megatron.core``, and its DDP, which knows the sizes of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.decorators import WITHOUT_CUDA, around, replace
from megatron_npu.adaptors.shared import communicators
from megatron_npu.base.errors import UsageError
from megatron_npu.devices import hccl
from megatron_npu.ops import dispatch
from megatron_npu.options import hccl_buffers

FLAG = "--nccl-communicator-config-path"
OF_NCCL = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")
# Of HCCL, as torch_npu's ProcessGroupHCCL.Options().hccl_config names them, with the least that is allowed.
OF_HCCL = {hccl.BUFFER: 1, "hccl_exec_timeout": 0, "hccl_op_expansion_mode": 0}


@replace(
    "megatron.core.parallel_state:get_nccl_options",
    devices=WITHOUT_CUDA,
    why="torch has ProcessGroupNCCL only if it was built with CUDA; FSDP uses it to request high-priority "
    "streams",
)
def get_nccl_options(pg_name: str, nccl_comm_cfgs: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the options that torch_npu accepts for a process group.

    Return None without options or on other devices.

    Args:
        pg_name: upstream's short name for the group, such as ``tp``.
        nccl_comm_cfgs: maps names to options, from the file given by ``--nccl-communicator-config-path``.

    Raises:
        UsageError: an option exists in neither HCCL nor NCCL, or HCCL does not accept its value.
        FallbackForbiddenError: an option exists only for NCCL, and strict mode is enabled.
    """
    given = nccl_comm_cfgs.get(pg_name) or {}
    config = hccl_config(pg_name, given)
    size = config.get(hccl.BUFFER, hccl_buffers.size_of_group(pg_name))
    if size is not None:
        config[hccl.BUFFER] = size
    if devices.current().name != "npu" or not (given or config):
        return None
    communicators.say_buffer(pg_name, size)
    return hccl.group_options(config, bool(given.get("is_high_priority_stream", False)))


def refuse_an_unreadable_file(args: Any) -> None:
    """Reject a configuration file that is unreadable or contains no groups.

    Raises:
        UsageError: the file does not exist, is not YAML, or contains something other than group options.
    """
    path = getattr(args, "nccl_communicator_config_path", None)
    if path is None:
        return
    import yaml

    expected, remedy = "YAML such as tp: {hccl_buffer_size: 32}", "Correct the file."
    try:
        text = Path(path).read_text(encoding="utf-8")
        groups = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(
            f"{FLAG} {path} cannot be read: {error.strerror}. It must be {expected}. Correct the path."
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{FLAG} {path} must be {expected}: {' '.join(str(error).split())}. {remedy}"
        ) from error
    if not isinstance(groups, dict) or not all(isinstance(each, dict) for each in groups.values()):
        raise UsageError(
            f"{FLAG} {path} must be {expected}, but it contains {' '.join(text.split())[:60]!r}. {remedy}"
        )


def hccl_config(group: str, given: Mapping[str, Any]) -> dict[str, int]:
    """Return the options of a process group that HCCL supports, and log those that only NCCL supports.

    Raises:
        UsageError: an option exists in neither HCCL nor NCCL, or HCCL does not accept its value.
        FallbackForbiddenError: an option exists only for NCCL, and strict mode is enabled.
    """
    for name, value in given.items():
        if name in OF_NCCL:
            reason = f"{name} of group {group} is an option for NCCL"
            dispatch.report_fallback(FLAG.removeprefix("--"), reason, "is partly ignored", f"Remove {name}")
        elif name in OF_HCCL:
            if not isinstance(value, int) or isinstance(value, bool) or value < OF_HCCL[name]:
                raise UsageError(
                    f"{FLAG}: {name} of group {group} must be an integer of at least {OF_HCCL[name]}, but "
                    f"got {value!r}. "
                    + ("Correct the file." if name != hccl.BUFFER else "Pass MiB, such as 32.")
                )
        elif name != "is_high_priority_stream":
            raise UsageError(
                f"{FLAG}: group {group} has the unknown option {name}; the options are "
                f"{', '.join((*OF_HCCL, 'is_high_priority_stream', *OF_NCCL))}. Correct the file."
            )
    return {name: given[name] for name in OF_HCCL if name in given}


@around(
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
    devices=("npu",),
    why=communicators.WHY,
)
def fit_buffers_of_gradients(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Choose the buffer sizes of the groups that reduce gradient buckets, unless the configuration file
    sets them.
    """
    original(self, *args, **kwargs)
    if not hccl_buffers.asked():
        return
    largest: dict[Any, int] = {}  # groups may have several buffers, one for each dtype
    for buffer in (*self.buffers, *self.expert_parallel_buffers):
        group, sizes = buffer.data_parallel_group, map(_bytes_of_bucket, buffer.buckets)
        largest[group] = max(largest.get(group, 0), *sizes)
    for group, size in largest.items():
        communicators.fit_buffer(group, size, group.group_desc)


def _bytes_of_bucket(bucket: Any) -> int:
    tensors = (bucket.grad_data, bucket.param_data)
    return max(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
