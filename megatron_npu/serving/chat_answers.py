"""Build the JSON responses of OpenAI's chat API, whole or in chunks."""

from __future__ import annotations

from typing import Any

from megatron_npu.generation.sampling.sampler import Sample
from megatron_npu.generation.sampling.scores import Score
from megatron_npu.serving.answers import Completion, Json
from megatron_npu.serving.engine import Piece, Read

_HALF = "\N{REPLACEMENT CHARACTER}"  # of a token that is a part of a character


class ChatCompletion(Completion):
    """The response to a chat request.

    The response omits the end token, which is not part of the text.
    """

    @property
    def kinds(self) -> tuple[str, str, str]:
        return "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[Json]:
        """Return the first chunk of each text, which names the role of the assistant."""
        begin: Json = {"role": "assistant", "content": ""}
        rows = range(len(self.texts))
        return [
            self._piece({"index": row, "delta": begin, "logprobs": None, "finish_reason": None})
            for row in rows
        ]

    def pieces(self, event: Piece | Read) -> list[Json]:
        """Return the chunks of a stream for one event."""
        told = super().pieces(event)
        for piece in told:
            for choice in piece["choices"]:
                message = choice.pop("message")
                choice["delta"] = {"content": message["content"]} if message["content"] else {}
        return told

    def _choice(
        self,
        row: int,
        text: str,
        sample: Sample | None,
        tokens: range,
        finish: str | None,
        read: Score | None = None,
    ) -> Json:
        message = {"role": "assistant", "content": text}
        logprobs = None
        if self.request.logprobs is not None and sample is not None:
            logprobs = {
                "content": [self._token(sample, place) for place in tokens if place < len(sample.tokens)]
            }
        return {"index": row, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def _token(self, sample: Sample, place: int) -> Json:
        top = [self._one(token, value) for token, value in sample.alternatives[place].items()]
        return {**self._one(sample.tokens[place], sample.logprobs[place]), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        word = self.word(token)
        content = None if _HALF in word else list(word.encode("utf-8"))
        return {"token": word, "logprob": logprob, "bytes": content}
