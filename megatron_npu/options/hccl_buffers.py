"""Support for ``--hccl-group-buffer-adaptive``: fit HCCL's buffers to the largest message of each group.

HCCL allocates two buffers per communicator, 200 MiB each by default. According to its documentation
(HCCL_BUFFSIZE), each should be as large as the data of a call; a larger message only takes more time. The
message sizes of a group follow from the arguments, except for gradients, whose buckets depend on the model
(``adaptors.shared.communicators``).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_npu import devices
from megatron_npu.base import digits
from megatron_npu.base.errors import UsageError

FLAG = "--hccl-group-buffer-adaptive"
DEFAULT = 200  # MiB, of each of a communicator's two (documentation of HCCL_BUFFSIZE)
_MEBIBYTE = 1 << 20
_FEW = 1  # norms, losses, counts of tokens, lengths: nothing near a MiB, the smallest buffer


@dataclass(frozen=True)
class GroupBuffers:
    """The buffer sizes of a run, which are as large as the messages of each group.

    They are stored in the process's device.

    Attributes:
        args: the validated arguments of Megatron or of the built-in trainer.
        fitted: the chosen size in MiB, keyed by the name of the group.
    """

    args: argparse.Namespace
    fitted: dict[str, int] = field(default_factory=dict)

    def largest_messages(self) -> dict[str, int]:
        """The largest message of each group; see ``largest_messages``."""
        return largest_messages(self.args)


def add(declare: Callable[..., Any]) -> None:
    """Add the flag, under MindSpeed's name, to a parser.

    Args:
        declare: ``add_argument`` of a parser or group.
    """
    declare(
        FLAG,
        action="store_true",
        help=(
            "set the size of HCCL's buffers to the largest message of each process group, if it is smaller "
            "than the default of 2 x 200 MiB; sizes in --nccl-communicator-config-path take precedence; NPU "
            "only"
        ),
    )


def choose(args: argparse.Namespace) -> None:
    """Store the run's arguments, from which the sizes of groups are computed later.

    Raises:
        UsageError: the flag is given, but the device is not an NPU.
    """
    asked, device = getattr(args, "hccl_group_buffer_adaptive", False), devices.current()
    if asked and device.name != "npu":
        raise UsageError(
            f"{FLAG} applies only to HCCL on an Ascend NPU, but the device is {device.name}",
            remedy="Remove the flag.",
        )
    device.group_buffers = GroupBuffers(args) if asked else None


def of_run() -> GroupBuffers | None:
    """Return the object that ``choose`` has stored, or None if the run does not use the flag."""
    noted = devices.current().group_buffers
    assert noted is None or isinstance(noted, GroupBuffers)
    return noted


def asked() -> bool:
    """Return True if this run uses the flag."""
    return of_run() is not None


def default() -> int:
    """Return the default size of one buffer in MiB."""
    return digits.number(os.environ.get("HCCL_BUFFSIZE", "")) or DEFAULT


def size_of_group(name: str) -> int | None:
    """Return the buffer size in MiB for upstream's group ``name``, such as ``tp``, or None if unknown."""
    run = of_run()
    largest = None if run is None else run.largest_messages().get(name)
    return None if largest is None else size_of(largest)


def size_of(message: int) -> int:
    """Return the buffer size in MiB for messages of the given number of bytes, at most the default."""
    return min(max(1, -(-message // _MEBIBYTE)), default())


def largest_messages(args: argparse.Namespace) -> dict[str, int]:
    """Return the largest message in bytes of each group, keyed by upstream's short names.

    Groups whose messages do not follow from the arguments are omitted: those of gradients (``dp_cp``,
    ``ep_dp`` and their parts), the world, and groups whose messages depend on the optimizer or model (Muon,
    state space models, FSDP).

    Args:
        args: the validated arguments of Megatron or of the built-in trainer.
    """
    names = ("mp", "tp_cp", "tp_dp", "tp_dp_cp", "tp_ep_pp", "intra_dist_opt_instance")
    sizes = dict.fromkeys(names, _FEW)
    if any(getattr(args, flag, False) for flag in _SHARDED):
        sizes = {}
    else:
        sizes["dp"] = _FEW
    sizes["pp"] = _between_stages(args)
    if "muon" not in getattr(args, "optimizer", "adam"):
        sizes["tp"] = _of_tensor_parallel_ranks(args)
    if not _has_state_spaces(args):
        sizes["cp"] = sizes["hcp"] = _of_context_parallel_ranks(args)
    if getattr(args, "num_experts", None):
        sizes |= _of_experts(args)
    vocabulary = getattr(args, "padded_vocab_size", None)
    if vocabulary:
        sizes["embd"] = vocabulary // args.tensor_model_parallel_size * args.hidden_size * 4
    sizes["pos_embd"] = (args.max_position_embeddings or 0) * args.hidden_size * 4
    return sizes


_SHARDED = ("use_torch_fsdp2", "use_custom_fsdp", "use_megatron_fsdp", "fully_sharded")


def _width(args: argparse.Namespace) -> int:
    """Return the size in bytes of one element in the layers' dtype."""
    return 2 if args.bf16 or args.fp16 else 4


def _length(args: argparse.Namespace) -> int:
    others = ("encoder_seq_length", "decoder_seq_length")
    return max(args.seq_length or 0, *(getattr(args, name, None) or 0 for name in others))


def _parts(args: argparse.Namespace) -> int:
    return getattr(args, "context_parallel_size", 1)


def _batch(args: argparse.Namespace) -> int:
    return max(args.micro_batch_size, getattr(args, "eval_micro_batch_size", None) or 0)


def _tokens(args: argparse.Namespace) -> int:
    """Return a micro batch's number of tokens per rank if only context parallelism shards the sequence."""
    tokens = _batch(args) * -(-_length(args) // _parts(args))
    if getattr(args, "hybrid_context_parallel", False):
        tokens = max(tokens, args.max_seqlen_per_dp_cp_rank)
    return tokens


def _states(args: argparse.Namespace) -> int:
    """Return the size in bytes of the residual stream, ``[s / cp, b, h]``."""
    width = 4 if getattr(args, "fp32_residual_connection", False) else _width(args)
    return _tokens(args) * args.hidden_size * width * _streams(args)


def _streams(args: argparse.Namespace) -> int:
    return args.num_residual_streams if getattr(args, "enable_hyper_connections", False) else 1


def _between_stages(args: argparse.Namespace) -> int:
    """Return the bytes that a stage sends at once; with interleaving, activations and gradients together."""
    together = 1 if getattr(args, "virtual_pipeline_model_parallel_size", None) is None else 2
    return together * _states(args) // (args.tensor_model_parallel_size if args.sequence_parallel else 1)


def _of_tensor_parallel_ranks(args: argparse.Namespace) -> int:
    """Return the bytes of the largest message: activations, latents, loss, batch, or unsharded gradients."""
    batch, length, tokens = _batch(args), _length(args), _tokens(args)
    latent = 0
    if getattr(args, "multi_latent_attention", False):
        latent = max(args.q_lora_rank or 0, args.kv_lora_rank + args.qk_pos_emb_head_dim)
    pairs = batch * length * length
    mask = pairs if getattr(args, "create_attention_mask_in_dataloader", False) else 0
    if getattr(args, "decoder_seq_length", None):  # T5: three masks as int64, in one tensor with the ids
        mask = 3 * 8 * pairs
    batch_of_ids = 8 * 8 * batch * (length + 1)
    return max(
        _states(args),
        tokens * latent * _width(args),
        2 * 4 * tokens,
        mask + batch_of_ids,
        _gradients_of_whole_parameters(args),
    )


def _gradients_of_whole_parameters(args: argparse.Namespace) -> int:
    """Return the maximum number of bytes of gradients that sequence parallelism reduces in one call.

    These include, per layer: norms of size h (two or four, and their biases), norms of heads and latents,
    biases after row-parallel layers, and the router.
    """
    if not args.sequence_parallel:
        return 0
    layers = -(-args.num_layers // args.pipeline_model_parallel_size)
    if _uneven(args):
        layers = args.num_layers
    layer = (12 + (getattr(args, "num_experts", None) or 0)) * args.hidden_size
    positions = (args.max_position_embeddings or 0) * args.hidden_size
    return 4 * ((layers + 1) * layer + positions)


def _uneven(args: argparse.Namespace) -> bool:
    """Return True if pipeline stages may have different numbers of layers."""
    names = (
        *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        "pipeline_model_parallel_layout",
    )
    return any(getattr(args, name, None) for name in names)


def _has_state_spaces(args: argparse.Namespace) -> bool:
    names = ("hybrid_override_pattern", "hybrid_layer_pattern", "is_hybrid_model")
    return any(getattr(args, name, None) for name in names)


def _of_context_parallel_ranks(args: argparse.Namespace) -> int:
    """Return the largest message in bytes of any scheme that exchanges queries, keys and values.

    A ring sends keys and values, with their gradients in the backward pass; all-to-all sends queries, keys
    and values, one by one; all-gather gathers the keys. A mask from the data loader is gathered even with a
    ring.
    """
    width, tokens, parts = _width(args), _tokens(args), _parts(args)
    heads, head = args.num_attention_heads, args.kv_channels
    keys, values = heads, head
    if getattr(args, "group_query_attention", False):
        keys = args.num_query_groups
    if getattr(args, "multi_latent_attention", False):
        keys, head, values = heads, args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    shared = -(-keys // args.tensor_model_parallel_size) * (head + values)
    own = heads // args.tensor_model_parallel_size * head
    ring = tokens * shared * (width + 4)
    swapped = tokens * (own + shared) * width
    gathered = parts * tokens * shared * width
    mask = _batch(args) * _length(args) ** 2
    return max(ring, swapped, gathered, mask if getattr(args, "reset_attention_mask", False) else 0)


def _of_experts(args: argparse.Namespace) -> dict[str, int]:
    """Return the bytes of tokens sent to experts if all of them go to the experts of one rank."""
    tokens = _tokens(args) // (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    experts, ranks = args.num_experts, args.expert_model_parallel_size
    sharing = getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size
    each = args.moe_router_topk
    sent, received = tokens * each, ranks * tokens * min(each, -(-experts // ranks))
    if getattr(args, "moe_expert_capacity_factor", None):  # perhaps padded to the capacity
        capacity = int(tokens * each / experts * args.moe_expert_capacity_factor) + 1
        sent = received = max(sent, experts * capacity)
    token = max(args.hidden_size * _width(args), 4)
    everywhere = tokens * ranks * sharing
    return {
        "ep": max(sent, received) * token,
        "ep_tp": sharing * max(sent, received) * token,
        "tp_ep_mp": everywhere * max(args.hidden_size * _width(args), 4 * experts),
    }
