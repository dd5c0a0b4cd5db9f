"""Select tokens from logits with greedy decoding, temperature, top-k and top-p (nucleus) sampling.

Top-p is from arXiv:1904.09751, section 3.1.
"""

from __future__ import annotations

import torch

from megatron_npu.generation.sampling.options import Options

# So many of the likeliest tokens are sorted first; in most texts they hold all that top-p asks for.
_LIKELY = 1024
_COLDEST = 1e-200  # temperature: the likeliest token alone is left long before; what it divides is a number
NO_NUMBER = -1  # in the place of a token where the logits are NaN or infinite


def choose(logits: torch.Tensor, options: Options, draws: torch.Tensor) -> torch.Tensor:
    """Select the next token of each row, and return the tokens ``[b]``, int64.

    The token is ``NO_NUMBER`` if a row's logits contain NaN or infinity.

    Args:
        logits: [b, vocabulary], fp32 on the host.
        options: the sampling options.
        draws: [b], fp64, one random number in [0, 1) per row, which determines the token that is selected.
    """
    if options.greedy:
        tokens = logits.argmax(-1)
        return _checked(tokens, logits.gather(-1, tokens[:, None])[:, 0])
    logits = logits.double() / max(options.temperature, _COLDEST)
    order, weights = _candidates(logits, options)
    cumulative = weights.cumsum(-1)
    # the first place where the sum passes the draw; rounding must not lead past the last that may be drawn
    places = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)
    places = places.minimum(_last_positive(weights))
    tokens = places if order is None else order.gather(-1, places)
    return _checked(tokens[:, 0], cumulative[:, -1])


def _candidates(logits: torch.Tensor, options: Options) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the candidates for the next token, ``[b, n]``, and their sampling weights, ``[b, n]``.

    None in place of the tokens means the whole vocabulary in its usual order.
    """
    if options.top_k:
        values, order = logits.topk(min(options.top_k, logits.size(-1)))
        weights = values.softmax(-1)
        return order, _nucleus(weights, options.top_p) if options.top_p else weights
    if not options.top_p:
        return None, logits.softmax(-1)
    values, order = logits.topk(min(_LIKELY, logits.size(-1)))
    weights = (values - logits.logsumexp(-1, keepdim=True)).exp()
    if bool((weights.sum(-1) < options.top_p).any()):
        values, order = logits.sort(descending=True, stable=True)
        weights = values.softmax(-1)
    return order, _nucleus(weights, options.top_p)


def _nucleus(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Set to zero all sorted weights after the smallest prefix whose sum reaches ``top_p``."""
    before = weights.cumsum(-1) - weights
    return weights.masked_fill(before >= top_p, 0.0)


def _last_positive(weights: torch.Tensor) -> torch.Tensor:
    """Return the last position in each row whose weight is above 0, ``[b, 1]``."""
    places = torch.arange(weights.size(-1))
    return torch.where(weights > 0, places, 0).amax(-1, keepdim=True)


def _checked(tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the tokens ``[b]``, with ``NO_NUMBER`` in rows in which ``values`` ``[b]`` is not finite."""
    return tokens.masked_fill(~torch.isfinite(values), NO_NUMBER)


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor, alternatives: int) -> torch.Tensor:
    """Return the log-probabilities of the selected tokens according to the model, before any sampling
    options.

    Temperature, top-k and top-p have no effect.

    Args:
        logits: [b, vocabulary], fp32 on the host.
        tokens: [b], the selected tokens.
        alternatives: the number n of alternatives.

    Returns:
        A tensor [b, 1 + 2n], fp32, with the log-probability of the token, the ids of the n most likely
        tokens, and the log-probabilities of these n tokens.
    """
    values = logits.double().log_softmax(-1)
    likeliest, ids = values.topk(min(alternatives, values.size(-1)))
    chosen = values.gather(-1, tokens.clamp(min=0)[:, None])
    return torch.cat([chosen, ids.double(), likeliest], -1).float()
