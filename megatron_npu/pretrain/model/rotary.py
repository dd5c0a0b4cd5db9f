"""Compute rotary frequencies that some megatron-core versions do not support or compute differently.

These are Llama 3's for an original length other than 8192, YaRN's (in megatron-core since 0.15, in its
scripts since 0.19), and those that depend on the text length (dynamic NTK). The formulas and the order of
operations are those of Transformers, so that both models use the same angles.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from megatron_npu.pretrain.flags import rotary_flags
from megatron_npu.pretrain.flags.plan_parts import ModelFlags


def scale(flags: ModelFlags, gpt: Any) -> None:
    """Replace the default rotary frequencies of a GPTModel with the frequencies that the flags select."""
    embedding = getattr(gpt, "rotary_pos_emb", None)
    if embedding is None or flags.multi_latent_attention:
        return
    if flags.position_embedding_type == "yarn":
        embedding.inv_freq = yarn(flags, embedding.inv_freq)
        factor = flags.yarn_scale
        for module in gpt.modules():
            # queries and keys times the factor, which is a factor of what they have in common
            if isinstance(module, DotProductAttention):
                module.softmax_scale *= factor**2
    elif not flags.use_rope_scaling or is_of_core(flags):
        return
    elif flags.rope_scaling_type == rotary_flags.DYNAMIC:
        gpt.rotary_pos_emb = DynamicRotary(flags, embedding)
    else:
        embedding.inv_freq = llama3(flags, embedding.inv_freq)


def is_of_core(flags: ModelFlags) -> bool:
    """Return True if ``--use-rope-scaling`` selects megatron-core's built-in scaling, with any factor."""
    given = {name: getattr(flags, name) for name in rotary_flags.NAMES}
    return given == rotary_flags.OF_CORE


def llama3(flags: ModelFlags, plain: Tensor) -> Tensor:
    """Return the rotary frequencies of Llama 3.

    Only frequencies with long wavelengths are divided by the factor.
    """
    length = flags.rope_scaling_original_max_position_embeddings
    low, high = flags.rope_scaling_low_freq_factor, flags.rope_scaling_high_freq_factor
    factor, waves = flags.rope_scaling_factor, 2 * math.pi / plain
    lowered = torch.where(waves > length / low, plain / factor, plain)
    smooth = (length / waves - low) / (high - low)
    between = ~(waves < length / high) & ~(waves > length / low)
    return torch.where(between, (1 - smooth) * lowered / factor + smooth * lowered, lowered)


def yarn(flags: ModelFlags, plain: Tensor) -> Tensor:
    """Return YaRN's rotary frequencies.

    High frequencies are kept, and low frequencies are interpolated.
    """
    pairs = plain.numel()
    dim, base, length = 2 * pairs, flags.rotary_base, flags.yarn_original_max_position_embeddings

    def channel(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = channel(flags.yarn_beta_fast), channel(flags.yarn_beta_slow)
    if flags.yarn_correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(pairs, dtype=torch.float32, device=plain.device) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    powers = base ** (torch.arange(0, dim, 2, device=plain.device).float() / dim)
    return 1.0 / (flags.rotary_scaling_factor * powers) * (1 - kept) + 1.0 / powers * kept


class DynamicRotary(RotaryEmbedding):
    """Rotary embedding whose base increases for texts that are longer than the original maximum length.

    All positions of a text that is processed at once use the frequencies for its length. If the text grows
    token by token with a KV cache, each token keeps the angles of its first use, as in Transformers.

    Args:
        flags: the flags of the model.
        plain: the embedding that this one replaces.
    """

    def __init__(self, flags: ModelFlags, plain: RotaryEmbedding) -> None:
        torch.nn.Module.__init__(self)
        for name, value in vars(plain).items():
            if name not in vars(self):
                setattr(self, name, value)
        self.plain, self.base = plain.inv_freq, float(flags.rotary_base)
        self.factor = flags.rope_scaling_factor
        self.original = flags.rope_scaling_original_max_position_embeddings
        self._growing: Any = None  # the context of a text that grows, from when its length is asked for

    def frequencies(self, length: int) -> Tensor:
        """Return the rotary frequencies for a text with the given number of tokens."""
        if length <= self.original:
            return self.plain
        dim = 2 * self.plain.numel()
        grown = self.factor * torch.tensor(length) / self.original - (self.factor - 1)
        base = (self.base * grown ** (dim / (dim - 2))).to(self.plain.device)
        return 1.0 / base ** (torch.arange(0, dim, 2, device=self.plain.device).float() / dim)

    def forward(self, max_seq_len: int, *args: Any, **options: Any) -> Tensor:
        """Return the angles ``[s, 1, 1, hn]`` for a text with the given number of tokens, as
        ``RotaryEmbedding`` does.
        """
        self.inv_freq = self.frequencies(int(max_seq_len))
        angles: Tensor = super().forward(max_seq_len, *args, **options)
        context, self._growing = self._growing, None
        if context is None:
            return angles
        past = context.sequence_len_offset
        if past:
            angles = torch.cat([context.angles_of_the_past[:past], angles[past:]])
        context.angles_of_the_past = angles
        return angles

    def get_rotary_seq_len(
        self, inference_context: Any, transformer: Any, transformer_input: Tensor, *rest: Any, **options: Any
    ) -> Any:
        """Return the number of tokens of the current text.

        Upstream's method returns the final number.
        """
        if inference_context is None:
            return super().get_rotary_seq_len(
                inference_context, transformer, transformer_input, *rest, **options
            )
        self._growing = inference_context
        stage = None if transformer is None else transformer.input_tensor
        new = transformer_input if stage is None else stage
        return inference_context.sequence_len_offset + new.size(0)
