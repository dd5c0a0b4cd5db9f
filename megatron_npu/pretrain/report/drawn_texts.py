"""Implement ``--sample-prompt``, which generates sample texts during training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_npu.base.errors import UsageError
from megatron_npu.data.tokenization.tokenizer import Tokenizer
from megatron_npu.generation.sampling.options import Options
from megatron_npu.generation.sampling.sampler import Sampler
from megatron_npu.pretrain.data import tokenizers
from megatron_npu.pretrain.flags.plan_parts import SampleFlags


class Text(NamedTuple):
    """A prompt and the text generated after it."""

    prompt: str
    added: str


class Samples:
    """Generates sample texts for the same prompts at intervals during a run.

    Args:
        flags: the prompts, and how they are continued.
        model: this process's chunks of the model.
    """

    def __init__(self, flags: SampleFlags, model: Sequence[torch.nn.Module]) -> None:
        self.prompts = flags.sample_prompt
        self._options = Options(flags.sample_tokens, temperature=flags.sample_temperature, seed=flags.seed)
        self._tokenizer = tokenizers.build(flags.tokenizer)
        self._ids = [ids_of(self._tokenizer, prompt) for prompt in self.prompts]
        self._sampler = Sampler(model, self._tokenizer, flags.tokenizer_vocab_size)

    def draw(self) -> list[Text]:
        """Generate a sample text for each prompt without using the global random generators.

        All ranks must call this.

        Raises:
            UsageError: the model's logits are NaN or infinite.
        """
        drawn = self._sampler.sample(self._ids, self._options)
        return [
            Text(prompt, _added(self._tokenizer, sample.prompt, sample.tokens))
            for prompt, sample in zip(self.prompts, drawn, strict=True)
        ]


def ids_of(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return a prompt's token ids.

    An empty prompt becomes the end token, which precedes every text in training.
    """
    return tokenizer.encode(prompt) or [tokenizer.eod]


def _added(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """Return the text that ``tokens`` append to the text of the prompt."""
    if prompt == [tokenizer.eod]:
        return tokenizer.decode(tokens)
    head, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *tokens])
    return whole.removeprefix(head) if whole.startswith(head) else tokenizer.decode(tokens)


def require_room(prompts: Sequence[str], positions: int, tokenizer: Tokenizer) -> None:
    """Check the prompts of ``--sample-prompt``, before a model with this number of positions is built.

    Raises:
        UsageError: a prompt is too long for the model, or contains text that the tokenizer cannot encode.
    """
    for prompt in prompts:
        number, most = len(ids_of(tokenizer, prompt)), positions - 1
        if number > most:
            raise UsageError(
                f"a --sample-prompt must have at most {most} tokens, one less than "
                f"--max-position-embeddings, but has {number}",
                remedy="Shorten the prompt.",
            )
