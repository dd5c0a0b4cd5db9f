"""Compute the size of the largest message of each process group from the sizes of a model and its layout."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, fields

_FEW = 1  # norms, losses, counts of tokens, lengths: nothing near a MiB, the smallest buffer
_SHARDED = ("use_torch_fsdp2", "use_custom_fsdp", "use_megatron_fsdp", "fully_sharded")


@dataclass(frozen=True)
class MessageSizes:
    """The arguments that determine the sizes of messages, with Megatron's names.

    Those with a default do not exist in every version of Megatron.
    """

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    kv_channels: int
    seq_length: int | None
    micro_batch_size: int
    max_position_embeddings: int | None
    bf16: bool
    fp16: bool
    sequence_parallel: bool
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    context_parallel_size: int = 1
    hybrid_context_parallel: bool = False
    max_seqlen_per_dp_cp_rank: int = 0
    virtual_pipeline_model_parallel_size: int | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    pipeline_model_parallel_layout: object = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    eval_micro_batch_size: int | None = None
    padded_vocab_size: int | None = None
    optimizer: str = "adam"
    use_torch_fsdp2: bool = False
    use_custom_fsdp: bool = False
    use_megatron_fsdp: bool = False
    fully_sharded: object = None
    fp32_residual_connection: bool = False
    enable_hyper_connections: bool = False
    num_residual_streams: int = 1
    create_attention_mask_in_dataloader: bool = False
    reset_attention_mask: bool = False
    group_query_attention: bool = False
    num_query_groups: int = 1
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0
    hybrid_override_pattern: str | None = None
    hybrid_layer_pattern: str | None = None
    is_hybrid_model: bool = False
    num_experts: int | None = None
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    moe_router_topk: int = 1
    moe_expert_capacity_factor: float | None = None

    @classmethod
    def of(cls, args: Namespace) -> MessageSizes:
        """Create the message sizes from the validated arguments of Megatron or of the built-in trainer."""
        return cls(
            **{each.name: getattr(args, each.name) for each in fields(cls) if hasattr(args, each.name)}
        )

    def largest(self) -> dict[str, int]:
        """Return the size in bytes of the largest message of each group, keyed by upstream's short names.

        Groups whose messages do not follow from the arguments are omitted: those of gradients (``dp_cp``,
        ``ep_dp`` and their parts), the world, and groups whose messages depend on the optimizer or model
        (Muon, state space models, FSDP).
        """
        names = ("mp", "tp_cp", "tp_dp", "tp_dp_cp", "tp_ep_pp", "intra_dist_opt_instance")
        sizes = dict.fromkeys(names, _FEW)
        if any(getattr(self, flag) for flag in _SHARDED):
            sizes = {}
        else:
            sizes["dp"] = _FEW
        sizes["pp"] = self._between_stages()
        if "muon" not in self.optimizer:
            sizes["tp"] = self._of_tensor_parallel_ranks()
        if not self._has_state_spaces():
            sizes["cp"] = sizes["hcp"] = self._of_context_parallel_ranks()
        if self.num_experts:
            sizes |= self._of_experts()
        if self.padded_vocab_size:
            sizes["embd"] = self.padded_vocab_size // self.tensor_model_parallel_size * self.hidden_size * 4
        sizes["pos_embd"] = (self.max_position_embeddings or 0) * self.hidden_size * 4
        return sizes

    def _width(self) -> int:
        """Return the size in bytes of one element in the dtype of the layers."""
        return 2 if self.bf16 or self.fp16 else 4

    def _length(self) -> int:
        others = ("encoder_seq_length", "decoder_seq_length")
        return max(self.seq_length or 0, *(getattr(self, name) or 0 for name in others))

    def _batch(self) -> int:
        return max(self.micro_batch_size, self.eval_micro_batch_size or 0)

    def _tokens(self) -> int:
        """Return the number of tokens in a micro-batch on one rank if only context parallelism shards
        sequences.
        """
        tokens = self._batch() * -(-self._length() // self.context_parallel_size)
        if self.hybrid_context_parallel:
            tokens = max(tokens, self.max_seqlen_per_dp_cp_rank)
        return tokens

    def _states(self) -> int:
        """Return the size in bytes of the hidden states, ``[s / cp, b, h]``."""
        width = 4 if self.fp32_residual_connection else self._width()
        return self._tokens() * self.hidden_size * width * self._streams()

    def _streams(self) -> int:
        return self.num_residual_streams if self.enable_hyper_connections else 1

    def _between_stages(self) -> int:
        """Return the number of bytes that a pipeline stage sends in one message.

        With interleaving, these are activations and gradients.
        """
        together = 1 if self.virtual_pipeline_model_parallel_size is None else 2
        return together * self._states() // (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    def _of_tensor_parallel_ranks(self) -> int:
        """Return the size in bytes of the largest message between tensor-parallel ranks.

        The candidates are activations, latents, the loss, the batch and unsharded gradients.
        """
        batch, length, tokens = self._batch(), self._length(), self._tokens()
        latent = 0
        if self.multi_latent_attention:
            latent = max(self.q_lora_rank or 0, self.kv_lora_rank + self.qk_pos_emb_head_dim)
        pairs = batch * length * length
        mask = pairs if self.create_attention_mask_in_dataloader else 0
        if self.decoder_seq_length:  # T5: three masks as int64, in one tensor with the ids
            mask = 3 * 8 * pairs
        batch_of_ids = 8 * 8 * batch * (length + 1)
        return max(
            self._states(),
            tokens * latent * self._width(),
            2 * 4 * tokens,
            mask + batch_of_ids,
            self._gradients_of_whole_parameters(),
        )

    def _gradients_of_whole_parameters(self) -> int:
        """Return the size in bytes of the gradients that are reduced in one call because of sequence
        parallelism.

        The gradients include, per layer: norms of size h (two or four, and their biases), norms of heads and
        latents, biases after row-parallel layers, and the router.
        """
        if not self.sequence_parallel:
            return 0
        layers = -(-self.num_layers // self.pipeline_model_parallel_size)
        if self._uneven():
            layers = self.num_layers
        layer = (12 + (self.num_experts or 0)) * self.hidden_size
        positions = (self.max_position_embeddings or 0) * self.hidden_size
        return 4 * ((layers + 1) * layer + positions)

    def _uneven(self) -> bool:
        """Return True if pipeline stages may have different numbers of layers."""
        names = (
            *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
            *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
            "pipeline_model_parallel_layout",
        )
        return any(getattr(self, name) for name in names)

    def _has_state_spaces(self) -> bool:
        names = ("hybrid_override_pattern", "hybrid_layer_pattern", "is_hybrid_model")
        return any(getattr(self, name) for name in names)

    def _of_context_parallel_ranks(self) -> int:
        """Return the size in bytes of the largest message of any context-parallel attention scheme.

        A ring sends keys and values, with their gradients in the backward pass; all-to-all sends queries,
        keys and values, one by one; all-gather gathers the keys. A mask from the data loader is gathered even
        with a ring.
        """
        width, tokens, parts = self._width(), self._tokens(), self.context_parallel_size
        heads, head = self.num_attention_heads, self.kv_channels
        keys, values = heads, head
        if self.group_query_attention:
            keys = self.num_query_groups
        if self.multi_latent_attention:
            keys, head, values = heads, self.qk_head_dim + self.qk_pos_emb_head_dim, self.v_head_dim
        shared = -(-keys // self.tensor_model_parallel_size) * (head + values)
        own = heads // self.tensor_model_parallel_size * head
        ring = tokens * shared * (width + 4)
        swapped = tokens * (own + shared) * width
        gathered = parts * tokens * shared * width
        mask = self._batch() * self._length() ** 2
        return max(ring, swapped, gathered, mask if self.reset_attention_mask else 0)

    def _of_experts(self) -> dict[str, int]:
        """Return the number of bytes that are sent to experts if all tokens are routed to experts on one
        rank.
        """
        tokens = self._tokens() // (self.tensor_model_parallel_size if self.sequence_parallel else 1)
        experts, ranks = self.num_experts or 0, self.expert_model_parallel_size
        sharing = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        each = self.moe_router_topk
        sent, received = tokens * each, ranks * tokens * min(each, -(-experts // ranks))
        if self.moe_expert_capacity_factor:  # perhaps padded to the capacity
            capacity = int(tokens * each / experts * self.moe_expert_capacity_factor) + 1
            sent = received = max(sent, experts * capacity)
        token = max(self.hidden_size * self._width(), 4)
        everywhere = tokens * ranks * sharing
        return {
            "ep": max(sent, received) * token,
            "ep_tp": sharing * max(sent, received) * token,
            "tp_ep_mp": everywhere * max(self.hidden_size * self._width(), 4 * experts),
        }
