"""Define the HTTP layer of the server, which handles routes, limits and clients that disconnect.

This layer accesses the model only through the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import time
from collections.abc import AsyncIterator, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megatron_npu.base.errors import UsageError
from megatron_npu.data.tokenization.hf import HuggingFaceTokenizer
from megatron_npu.generation.chat_template import ChatTemplate
from megatron_npu.generation.sampling.options import Options
from megatron_npu.serving import answers, chat_request, completion_request
from megatron_npu.serving.answers import Completion
from megatron_npu.serving.chat_answers import ChatCompletion
from megatron_npu.serving.chat_request import ChatRequest
from megatron_npu.serving.completion_request import BadRequestError, CompletionRequest, in_words
from megatron_npu.serving.engine import Engine, Job, Piece, Read, new_job
from megatron_npu.web.headers import HEADERS

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_PATIENCE = 30.0  # seconds for a body to arrive
_LOOKING = 0.25  # seconds between two looks whether the client is still there, while nothing comes
_DRAINED = 16  # times the largest body: so much of a larger one is read, so that its sender reads the answer
_PAGE = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css")}
_PAGE["/page.js"] = ("page.js", "text/javascript")


def build(engine: Engine, name: str, max_body: int, max_texts: int, hosts: Sequence[str]) -> ASGIApp:
    """Return the web application.

    Args:
        engine: the engine that generates the texts.
        name: the name of the model.
        max_body: the maximum size of a request in bytes.
        max_texts: the maximum number of completions per request.
        hosts: the host names that clients may use for the server; ``*`` allows any name.
    """
    site = _Site(engine, name, max_body, max_texts)
    routes = [Route(path, site.page, methods=["GET"]) for path in _PAGE]
    routes += [
        Route("/health", site.health, methods=["GET"]),
        Route("/v1/models", site.models, methods=["GET"]),
        Route("/v1/models/{name:path}", site.model, methods=["GET"]),
        Route("/v1/completions", site.completions, methods=["POST"]),
        Route("/v1/chat/completions", site.chat_completions, methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        # a page of another site, whose name leads here, must not read what the model says
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
        exception_handlers={BadRequestError: _refusal, HTTPException: _http_refusal},  # type: ignore[dict-item]
    )


async def _refusal(request: Request, problem: BadRequestError) -> Response:
    headers = {"Retry-After": "1"} if problem.status in (429, 503) else None
    return JSONResponse(answers.error(problem), problem.status, headers)


async def _http_refusal(request: Request, problem: HTTPException) -> Response:
    return await _refusal(request, BadRequestError(problem.detail, status=problem.status_code))


class _Site:
    """The functions that handle the routes of the web application."""

    def __init__(self, engine: Engine, name: str, max_body: int, max_texts: int) -> None:
        self.engine, self.name = engine, name
        self.max_body, self.max_texts = max_body, max_texts
        self.created = int(time.time())

    async def page(self, request: Request) -> Response:
        file, kind = _PAGE[request.url.path]
        content = resources.files(__package__).joinpath(file).read_bytes()
        return Response(content, media_type=kind, headers=HEADERS)

    async def health(self, request: Request) -> Response:
        """Respond that the server is running, with the numbers of unfinished requests and of generated
        tokens.
        """
        engine = self.engine
        return JSONResponse({"status": "ok", "requests": engine.waiting, "tokens": engine.tokens})

    def _about_model(self) -> answers.Json:
        return answers.model(self.name, self.created, self.engine.model.sampler.positions)

    async def models(self, request: Request) -> Response:
        return JSONResponse(answers.models(self._about_model()))

    async def model(self, request: Request) -> Response:
        self._require_name(request.path_params["name"])
        return JSONResponse(self._about_model())

    async def completions(self, request: Request) -> Response:
        asked = completion_request.parse(await self._body(request))
        self._require_limits(asked, len(asked.prompts))
        return await self._answer(request, self._completion(asked))

    async def chat_completions(self, request: Request) -> Response:
        asked = chat_request.parse(await self._body(request))
        self._require_limits(asked.request, 1)
        return await self._answer(request, self._chat_completion(asked))

    async def _answer(self, request: Request, completion: Completion) -> Response:
        """Submit a completion to the engine, and respond with the whole result or a stream."""
        self.engine.submit(completion.job)
        events = _events(request, completion.job)
        if completion.request.stream:
            return StreamingResponse(_stream(completion, events), media_type="text/event-stream")
        async for event in events:
            completion.add(event)
        return JSONResponse(completion.whole())

    async def _body(self, request: Request) -> bytes:
        """Read the body of a request, and return it.

        Raises:
            BadRequestError: the body is too large, arrives too slowly, does not arrive before the server
                stops, or is not declared as JSON.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # what a page of another site could send without being asked for leave
            raise BadRequestError("the Content-Type must be application/json", status=415)
        reading = asyncio.ensure_future(self._read(request))
        until = time.monotonic() + _PATIENCE
        try:
            while not (await asyncio.wait({reading}, timeout=_LOOKING))[0]:
                self.engine.require_going()
                if time.monotonic() > until:
                    raise BadRequestError(
                        f"the request body did not arrive within {_PATIENCE:g} s", status=408
                    )
            return reading.result()
        except ClientDisconnect as error:
            raise BadRequestError("the client has disconnected", status=499) from error
        finally:
            reading.cancel()  # of no effect where it has ended

    async def _read(self, request: Request) -> bytes:
        body, total = bytearray(), 0
        async for chunk in request.stream():
            total += len(chunk)
            if total <= self.max_body:
                body += chunk
            elif total > _DRAINED * self.max_body:
                break
        if total > self.max_body:
            raise BadRequestError(f"the request body has more than {self.max_body} bytes", status=413)
        return bytes(body)

    def _require_name(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise BadRequestError(
                f"the model {name[:60]!r} does not exist; the only model is {self.name!r}", "model", 404
            )

    def _require_limits(self, asked: CompletionRequest, prompts: int) -> None:
        """Reject requests that exceed the limits of the server.

        Raises:
            BadRequestError: the request names another model, or asks for too many texts.
        """
        self._require_name(asked.model)
        texts = prompts * asked.n
        if texts > self.max_texts:
            raise BadRequestError(
                f"the request asks for {texts} completions, but at most {self.max_texts} are allowed per "
                "request",
                "n",
            )

    def _completion(self, asked: CompletionRequest) -> Completion:
        """Return the job for a completion request, and the response to which the job's results are added.

        Raises:
            BadRequestError: the model cannot process the request.
        """
        model = self.engine.model
        prompts = [self._ids(prompt) for prompt in asked.prompts]
        rows = [ids for ids in prompts for _ in range(asked.n)]
        scored = asked.logprobs if asked.scored else None
        job = new_job(model, rows, _options(asked) if asked.max_tokens else None, asked.stop, scored)
        echoes = [
            model.tokenizer.decode(ids) if asked.echo and prompt is not None else ""
            for ids, prompt in zip(prompts, asked.prompts, strict=True)
            for _ in range(asked.n)
        ]
        return Completion(asked, job, self.name, model.tokenizer, echoes)

    def _chat_completion(self, asked: ChatRequest) -> ChatCompletion:
        """Return the job for a chat request, and the response to which the job's results are added.

        Raises:
            BadRequestError: the checkpoint has no chat template, the template rejects the messages, or the
                messages are too long.
        """
        model = self.engine.model
        try:
            template, tokenizer = self._template, model.tokenizer
            if template is None or not isinstance(tokenizer, HuggingFaceTokenizer):
                raise BadRequestError(
                    "this checkpoint has no chat template; send plain text to /v1/completions instead",
                    "messages",
                )
            text = template.render(asked.messages)
            self._require_length(text)
            ids = tokenizer.encode(text, special_tokens=False)
            model.sampler.check(ids)
        except UsageError as error:
            raise in_words(error, "messages") from error
        room = model.sampler.positions - len(ids)
        request = dataclasses.replace(asked.request, prompts=[ids], max_tokens=asked.max_tokens or room)
        job = new_job(model, [ids] * request.n, _options(request), request.stop)
        return ChatCompletion(request, job, self.name, tokenizer, [""] * request.n)

    def _require_length(self, text: str) -> None:
        """Limit what a template may make of a request as a request is limited: its tokens take memory."""
        if len(text) > self.max_body:
            raise BadRequestError(
                f"the chat template turns the messages into {len(text)} characters, but a text may have at "
                f"most {self.max_body}; send fewer messages",
                "messages",
            )

    @functools.cached_property
    def _template(self) -> ChatTemplate | None:
        return self.engine.model.chat_template()

    def _ids(self, prompt: completion_request.Prompt) -> list[int]:
        model = self.engine.model
        if prompt is None:
            return [model.sampler.end]
        try:
            return prompt if isinstance(prompt, list) else model.prompt(prompt)
        except UsageError as error:
            raise in_words(error, "prompt") from error


def _options(asked: CompletionRequest) -> Options:
    """Return the sampling options that a request contains.

    Without a seed, each request generates different texts.
    """
    seed = time.time_ns() if asked.seed is None else asked.seed
    return Options(
        num_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=0.0 if asked.top_p == 1 else max(asked.top_p, 1e-9),
        seed=seed % (1 << 62),
        alternatives=asked.logprobs,
    )


async def _events(request: Request, job: Job) -> AsyncIterator[Piece | Read]:
    """Yield the events of a job, and cancel the job if its client has disconnected.

    Raises:
        BadRequestError: the job has failed, or the client has disconnected.
    """
    try:
        while True:
            try:
                event = await asyncio.wait_for(job.events.get(), _LOOKING)
            except TimeoutError:
                event = job  # type: ignore[assignment]  # nothing yet
            if await request.is_disconnected():
                raise BadRequestError("the client has disconnected", status=499)
            if event is None:
                return
            if isinstance(event, BadRequestError):
                raise event
            if isinstance(event, Piece | Read):
                yield event
    finally:
        job.cancelled = True  # of no effect where it has ended


async def _stream(completion: Completion, events: AsyncIterator[Piece | Read]) -> AsyncIterator[str]:
    """Yield the server-sent events of a streamed completion."""

    def line(values: Any) -> str:
        return f"data: {json.dumps(values, ensure_ascii=False)}\n\n"

    for piece in completion.opening():
        yield line(piece)
    try:
        async for event in events:
            completion.add(event)
            for piece in completion.pieces(event):
                yield line(piece)
    except BadRequestError as problem:
        yield line(answers.error(problem))
        return
    if completion.request.include_usage:
        yield line(completion.last())
    yield "data: [DONE]\n\n"
