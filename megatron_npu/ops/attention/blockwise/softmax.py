"""Compute the scores of an attention tile, apply the mask, and compute the softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.ops import compiled
from megatron_npu.ops.attention.blockwise.buffers import Buffers
from megatron_npu.ops.attention.blockwise.products import TileProducts
from megatron_npu.ops.attention.blockwise.tiles import Tile
from megatron_npu.ops.attention.spec import AttentionSpec
from megatron_npu.ops.caching import lru_cache_tensors


class TileSoftmax:
    """Softmax of the attention scores, computed tile by tile.

    Args:
        spec: the call.
        mask: ``[b or 1, n or 1, sq or 1, sk or 1]``, True where masked, or None.
        products: the call's matmuls; scores and weights have their dtype ``sums``.
        buffers: the call's scratch memory.
    """

    def __init__(
        self, spec: AttentionSpec, mask: Tensor | None, products: TileProducts, buffers: Buffers
    ) -> None:
        self._spec = spec
        self._mask = mask
        self._products = products
        self._buffers = buffers

    def scores_of(self, tile: Tile) -> Tensor:
        """Return a buffer for the scores of a tile, ``[heads, queries · r, keys]``.

        The buffer can be reused once the weights are computed.
        """
        return self._buffers.take("scores", tile.shape, self._products.sums)

    def weights(self, tile: Tile, rows: Tensor, columns: Tensor) -> Tensor:
        """Return a tile's attention weights ``[heads, queries · r, keys]`` before dropout.

        Args:
            tile: the tile to compute.
            rows: its queries, ``[heads, queries · r, d]``, in dtype ``products.of_scores``.
            columns: its keys, ``[heads, keys, d]``, in the same dtype.
        """
        scores = self._scores(tile, rows, columns)
        has_keys = None
        if self._mask is not None:
            has_keys = _forbid_masked(scores, tile, self._mask, self._spec.key_heads)
        weights = self.weights_of(tile)
        torch.ops.aten._softmax.out(scores, -1, False, out=weights)
        return weights if has_keys is None else weights.mul_(has_keys)

    def rounds(self, dtype: torch.dtype) -> bool:
        """Return True if a single pass can convert unmasked scores to attention weights in ``dtype``."""
        return self._mask is None and dtype is torch.bfloat16 and compiled.available()

    def rounded_weights(
        self, tile: Tile, rows: Tensor, columns: Tensor, weights: Tensor | None, kept: compiled.Kept | None
    ) -> Tensor:
        """Return a tile's attention weights in bf16 after dropout; call this only if ``rounds`` returns True.

        All unrounded weights are written to ``weights``.
        """
        scores = self._scores(tile, rows, columns)
        rounded = self._buffers.take("dropped", tile.shape, torch.bfloat16)
        compiled.softmax(scores, weights, rounded, kept)
        return rounded

    def weights_of(self, tile: Tile) -> Tensor:
        """Return a buffer for the attention weights of a tile, ``[heads, queries · r, keys]``."""
        return self._buffers.take("weights", tile.shape, self._products.sums)

    def rounded_backward(
        self, tile: Tile, grad: Tensor, weights: Tensor, kept: compiled.Kept | None
    ) -> Tensor:
        """Return the bf16 gradient of the scores, given that of the kept weights; call this only if
        ``rounds`` returns True.
        """
        rounded = self._buffers.take("dropped", tile.shape, torch.bfloat16)
        compiled.softmax_backward(grad, weights, rounded, kept)
        return rounded

    def _scores(self, tile: Tile, rows: Tensor, columns: Tensor) -> Tensor:
        scores = self.scores_of(tile)
        self._products.precise(scores, rows, columns, self._spec.scale)
        _forbid_beyond_window(scores.unflatten(1, (-1, tile.repeats)), tile)
        return scores

    @staticmethod
    def backward(grad: Tensor, weights: Tensor) -> None:
        """Replace the gradient of the attention weights with the gradient of the scores, in place."""
        torch.ops.aten._softmax_backward_data.out(grad, weights, -1, weights.dtype, grad_input=grad)


def _forbid_beyond_window(scores: Tensor, tile: Tile) -> None:
    """Set the scores ``[heads, queries, r, keys]`` of all keys outside the segment's window to -inf.

    Only the corners of a tile are touched: between its two diagonals every query sees every key. The corners
    are added, not filled in: masked_fill_ takes several times as long (torch 2.13).
    """
    left, right = tile.segment.window_left, tile.segment.window_right
    rows = tile.q1 - tile.q0
    if right is not None:
        start = tile.q0 + right + 1  # the first key that the first query does not see
        width = tile.k1 - start
        if width > 0:
            scores[..., start - tile.k0 :].add_(_corner(rows, scores.dtype)[:, None, :width])
    if left is not None:
        skip = max(0, left - tile.q0)  # the first queries, which see their keys from the very first
        width = tile.q1 - 1 - left - tile.k0
        if width > 0:
            corner = _corner(rows, scores.dtype).mT[: rows - skip, :width]
            # the diagonal itself is visible here: the transposed corner begins one row further down
            scores[:, skip + 1 :, :, :width].add_(corner[: rows - skip - 1, None])


@lru_cache_tensors(maxsize=8)
def _corner(rows: int, dtype: torch.dtype) -> Tensor:
    """Return a ``[rows, rows]`` tensor with -inf on and above the diagonal, and 0 below the diagonal."""
    return torch.full((rows, rows), float("-inf"), dtype=dtype, device="cpu").triu_()


def _forbid_masked(scores: Tensor, tile: Tile, mask: Tensor, key_heads: int) -> Tensor:
    """Apply the mask to a tile's scores.

    Return ``[heads, queries · r, 1]``, which is 0 for fully masked queries.

    Masked scores are set to the smallest finite number, because the softmax of a row of -inf is nan.
    """
    least = torch.finfo(scores.dtype).min
    batch, first = divmod(tile.h0, key_heads)
    mask = mask[min(batch, mask.size(0) - 1)]  # [n or 1, sq or 1, sk or 1]
    if mask.size(0) > 1:
        mask = mask.unflatten(0, (key_heads, tile.repeats))[first : first + tile.h1 - tile.h0]
    else:
        mask = mask[:, None]
    if mask.size(2) > 1:
        mask = mask[:, :, tile.q0 : tile.q1]
    if mask.size(3) > 1:
        mask = mask[..., tile.k0 : tile.k1]
    # added, not filled in, for speed; |score| is lost in the sum, which is `least` exactly (or -inf before)
    scores.unflatten(1, (-1, tile.repeats)).add_(mask.transpose(1, 2).to(scores.dtype).mul_(least))
    return (scores.amax(-1, keepdim=True) > least).to(scores.dtype)
