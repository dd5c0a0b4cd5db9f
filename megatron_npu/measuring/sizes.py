"""Define model sizes, by name or as LAYERSxHIDDEN, with their numbers of parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from megatron_npu.base.arg_parser import Unfit

HEAD = 64  # channels of a head, where a size does not say how many heads there are
_SHAPE = re.compile(r"(\d+)x(\d+)(?:x(\d+))?")


@dataclass(frozen=True)
class Size:
    """The sizes of a BERT or GPT model.

    Attributes:
        name: the name as given.
        layers, hidden, heads: the sizes of the transformer; the inner size of a feed-forward layer is 4 x
            hidden.
        seq_length: the number of tokens per sample, and of positions.
        vocabulary: the number of rows of the embedding; 0 means that of the family's documented model.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    seq_length: int
    vocabulary: int = 0


@dataclass(frozen=True)
class Family:
    """A model family: BERT or GPT.

    Attributes:
        name: ``bert`` or ``gpt``.
        seq_length, vocabulary: the values of the document's model.
        sizes: the named sizes, smallest first.
        documented: the name of the document's model.
    """

    name: str
    seq_length: int
    vocabulary: int
    sizes: tuple[Size, ...]
    documented: str

    def size(self, text: str, seq_length: int | None = None, vocabulary: int | None = None) -> Size:
        """Return the size that ``text`` names, with the given sequence length and vocabulary size.

        Raises:
            Unfit: ``text`` is not a size of this family.
        """
        found = next((size for size in self.sizes if size.name == text), None) or self._shape(text)
        return replace(
            found,
            seq_length=seq_length or found.seq_length,
            vocabulary=vocabulary or found.vocabulary or self.vocabulary,
        )

    def _shape(self, text: str) -> Size:
        match = _SHAPE.fullmatch(text)
        names = ", ".join(size.name for size in self.sizes)
        expected = f"{names}, or LAYERSxHIDDEN[xHEADS] such as 4x256"
        if match is None or "0" in match.groups():
            raise Unfit(text, expected)
        layers, hidden = int(match[1]), int(match[2])
        heads = int(match[3] or max(1, hidden // HEAD))
        if hidden % heads:
            raise Unfit(f"{text}: {hidden} channels are not divisible by {heads} heads", expected)
        return Size(text, layers, hidden, heads, self.seq_length)


BERT = Family(
    "bert",
    seq_length=512,
    vocabulary=30522,
    sizes=(
        Size("bert-tiny", 4, 256, 4, seq_length=128, vocabulary=8192),
        Size("bert-base", 12, 768, 12, seq_length=512),
        Size("bert-large", 24, 1024, 16, seq_length=512),
    ),
    documented="bert-base",
)
GPT = Family(
    "gpt",
    seq_length=1024,
    vocabulary=50304,  # GPT-2's 50,257 tokens, padded to a multiple of 128 as Megatron does
    sizes=(
        Size("gpt-tiny", 4, 256, 4, seq_length=256, vocabulary=8192),
        Size("gpt-124m", 12, 768, 12, seq_length=1024),
        Size("gpt-1.3b", 24, 2048, 32, seq_length=1024),
    ),
    documented="gpt-1.3b",
)


def layer_parameters(size: Size) -> int:
    """Return the number of parameters of all layers, each with attention, a feed-forward part and two
    layer norms.
    """
    return size.layers * (12 * size.hidden**2 + 13 * size.hidden)


def parameters(family: Family, size: Size) -> int:
    """Return the number of parameters of a GPT with tied embeddings, or of a BERT with both heads."""
    hidden, vocabulary = size.hidden, size.vocabulary
    embeddings = (vocabulary + size.seq_length) * hidden
    if family is GPT:
        return embeddings + layer_parameters(size) + 2 * hidden
    embeddings += 2 * hidden + 2 * hidden  # two token types, a layer norm
    pooler = hidden**2 + hidden
    heads = hidden**2 + 3 * hidden + vocabulary + 2 * hidden + 2
    return embeddings + layer_parameters(size) + pooler + heads
