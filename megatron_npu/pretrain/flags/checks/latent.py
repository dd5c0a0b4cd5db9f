"""Check the flags of multi-latent attention and multi-token prediction."""

from __future__ import annotations

from argparse import Namespace

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags import derive, latent_flags
from megatron_npu.pretrain.flags.checks import nothing_without


def check(args: Namespace) -> None:
    """Check the flags of multi-latent attention and multi-token prediction, and set the rotary embedding
    type.

    Raises:
        UsageError: a flag requires another, or megatron-core would ignore a flag.
    """
    if args.multi_latent_attention:
        derive.latent(args)
        _attention(args)
    else:
        yarn = args.position_embedding_type == "yarn"  # which has the same scale
        add = latent_flags.add_attention if yarn else latent_flags.add
        nothing_without("--multi-latent-attention", add, args, "Add --multi-latent-attention.")
    if args.mtp_num_layers is not None:
        _prediction(args)


def _attention(args: Namespace) -> None:
    for flag, given in (
        ("--group-query-attention", args.group_query_attention),
        ("--use-rope-scaling", args.use_rope_scaling),
        ("--rotary-seq-len-interpolation-factor", args.rotary_seq_len_interpolation_factor is not None),
        ("--rotary-interleaved", args.rotary_interleaved),
        ("--add-qkv-bias", args.add_qkv_bias),
    ):
        if given:
            raise UsageError(
                f"{flag} cannot be used with --multi-latent-attention, which has its own keys, rotary "
                "embedding and projections",
                remedy=f"Remove {flag}.",
            )
    if args.position_embedding_type != "rope":
        raise UsageError(
            "--multi-latent-attention requires --position-embedding-type rope, because it always rotates "
            f"part of each head, but got {args.position_embedding_type}",
            remedy="Pass --position-embedding-type rope.",
        )
    if args.qk_pos_emb_head_dim % 2:
        raise UsageError(
            "--qk-pos-emb-head-dim must be even, because rotary embeddings rotate pairs of channels, but "
            f"got {args.qk_pos_emb_head_dim}",
            remedy="Change this value.",
        )


def _prediction(args: Namespace) -> None:
    if args.position_embedding_type == "learned_absolute":
        raise UsageError(
            "--mtp-num-layers cannot be used with --position-embedding-type learned_absolute, because "
            "megatron-core supports multi-token prediction only with rope or none",
            remedy="Pass --position-embedding-type rope.",
        )
    if args.pipeline_model_parallel_size > 1 and not args.untie_embeddings_and_output_weights:
        raise UsageError(
            "--mtp-num-layers with --pipeline-model-parallel-size requires a separate output layer, "
            "because the last stage also has the embedding, and megatron-core (0.16) fails an assertion "
            "when saving both",
            remedy="Pass --untie-embeddings-and-output-weights.",
        )
    if args.context_parallel_size > 1 and tuple(map(int, args.megatron_version.split(".")[:2])) < (0, 15):
        raise UsageError(
            "--mtp-num-layers with --context-parallel-size cannot be used with megatron-core "
            f"{args.megatron_version}, only with 0.15 or later",
            remedy="Remove one of the two flags.",
        )
