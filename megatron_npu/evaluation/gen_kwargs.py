"""Parse and check the ``generation_kwargs`` of a task of lm-eval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.evaluation import model_args
from megatron_npu.generation.sampling.options import Options

_WHERE = "generation_kwargs"
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first one counts
# What says nothing here, with the values that ask for nothing; None: any.
_WITHOUT_MEANING: dict[str, tuple[object, ...] | None] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1,),
    "use_cache": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Wish:
    """The settings for generating a text in an lm-eval task.

    Attributes:
        until: the strings that end the generation and are not part of the result.
        tokens: the maximum number of tokens to generate.
        temperature, top_k, top_p: see ``Options``.
    """

    until: tuple[str, ...]
    tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0

    @classmethod
    def of(cls, wanted: Mapping[str, Any], tokens: int) -> Wish:
        """Read the generation settings from a request.

        Args:
            wanted: the keywords of the request.
            tokens: the default number of tokens.

        Raises:
            UsageError: a keyword is not supported, or its value is not a number.
        """
        rest = dict(wanted)
        until = rest.pop("until", None) or []
        lengths = [value for value in (rest.pop(name, None) for name in _LENGTHS) if value is not None]
        temperature = _temperature(rest)
        top_p = model_args.real("top_p", rest.pop("top_p", None) or 1.0, _WHERE)
        top_k = model_args.count("top_k", rest.pop("top_k", None) or 0, _WHERE, least=0)
        _refuse_unknown(rest)
        return cls(
            until=(until,) if isinstance(until, str) else tuple(until),
            tokens=model_args.count("max_gen_toks", (lengths or [tokens])[0], _WHERE),
            temperature=temperature,
            top_k=top_k,
            top_p=0.0 if top_p == 1 else top_p,
        )

    def options(self, seed: int) -> Options:
        """Return the sampling options that correspond to the settings."""
        return Options(
            num_tokens=self.tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=seed,
        )


def _refuse_unknown(rest: Mapping[str, Any]) -> None:
    for name, value in rest.items():
        allowed = _WITHOUT_MEANING.get(name, ())
        if allowed is not None and value not in allowed:
            raise UsageError(
                f"generation_kwargs {name}={value!r} is not supported; the supported keys are "
                "until, max_gen_toks, do_sample, temperature, top_p and top_k. Change the task, "
                "or convert the checkpoint and evaluate it with --model hf."
            )


def _temperature(rest: dict[str, Any]) -> float:
    """Remove ``do_sample`` and ``temperature`` from the settings, and return the resulting temperature.

    When sampling, the default is 1.
    """
    sampled = rest.pop("do_sample", None)
    temperature = model_args.real("temperature", rest.pop("temperature", None) or 0.0, _WHERE)
    if sampled is None:
        return temperature
    return (temperature or 1.0) if sampled else 0.0
