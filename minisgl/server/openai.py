"""`/v1/chat/completions` and `/v1/completions`.

    request ──> OpenAIService.chat / .completion ──> OpenAICall ──> response() or chunks()
                  ready? model? n? parameters?        the generations of the request's prompts,
                  prompt to ids, submit               a choice for each of their sequences

The service knows nothing of HTTP: whoever has a request object can call it. The routes add the
headers and, by `CallResponse`, the watch over the client's connection.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Header
from starlette.responses import Response

from minisgl import __version__
from minisgl.errors import InvalidRequestError
from minisgl.llm.requests import naming_prompt
from minisgl.params import SamplingParams

from .choices import ChatChoice, ChatOptions, Prompt, TextChoice, TextOptions
from .context import ServerContext
from .errors import ErrorBody, check_model, prompt_called
from .generation import Generation
from .jsonbody import StrictRoute
from .large import check_echo, check_entries
from .openai_call import Heading, OpenAICall
from .protocol import ChatCompletionRequest, CompletionRequest, SamplingBody
from .reasoning import ReasoningParser
from .responses import ChatCompletion, Completion
from .sse import STREAM_CONTENT, CallResponse
from .submitted import aborted_on_error

__all__ = ["OpenAIService", "RequestId", "router"]


class OpenAIService:
    """Answers the requests of both endpoints, whether they came by HTTP or not.

    The calls return when the request is queued. They raise `InvalidRequestError` and `ApiError`
    for what can't be served, `BusyError` and `EngineDeadError` for what can't be now.
    """

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._known_parser: ReasoningParser | None = None

    async def chat(
        self, request: ChatCompletionRequest, request_id: str | None = None
    ) -> OpenAICall:
        """Go on with a conversation."""
        self._check(request, 1)
        request.check_template_kwargs(self._context.config.template_kwargs)
        params = request.to_params()
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        heading = self._heading("chatcmpl-", kind, request_id)
        with prompt_called("messages"):
            ids = await self._context.engine.encode_chat(
                request.to_messages(),
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                template_kwargs=request.template_kwargs(),
            )
            generations = self._submit([ids], params, request, heading, fill_context=True)
        with aborted_on_error(generations):
            texts = self._context.token_texts
            options = ChatOptions(texts if request.logprobs else None, request.include_reasoning)
            splitters = self._reasoning_parser().splitters(request, ids)
            choices = [ChatChoice(index, options, one) for index, one in enumerate(splitters)]
            shown = TextOptions(texts, prompt_logprobs=request.prompt_logprobs)
            prompt = Prompt(generations[0], shown, echo=None)
            return OpenAICall(heading, request, [prompt], choices, beside=True)

    async def completion(
        self, request: CompletionRequest, request_id: str | None = None
    ) -> OpenAICall:
        """Go on with texts."""
        texts = request.prompts()
        self._check(request, len(texts))
        params = request.to_params()
        ids, echoes = [], []
        for index, text in enumerate(texts):
            with naming_prompt(index, len(texts)):
                ids.append(await self._context.engine.encode(text))
                echoes.append(await self._echo(text, request))
        check_echo((echo for echo in echoes if echo is not None), request.n)
        heading = self._heading("cmpl-", "text_completion", request_id)
        generations = self._submit(ids, params, request, heading, fill_context=False)
        with aborted_on_error(generations):
            options = TextOptions(
                self._context.token_texts, request.logprobs, request.prompt_logprobs
            )
            prompts = [
                Prompt(generation, options, echo)
                for generation, echo in zip(generations, echoes, strict=True)
            ]
            every = [prompt for prompt in prompts for _ in range(request.n)]
            choices = [TextChoice(index, prompt) for index, prompt in enumerate(every)]
            return OpenAICall(heading, request, prompts, choices)

    def _check(self, request: SamplingBody, num_prompts: int) -> None:
        """What needs no prompt's ids, before anything is done for each prompt or choice."""
        context = self._context
        context.state.require_ready()
        check_model(request.model, context.model_name)
        request.check_n(context.config.max_n)
        if request.stream and request.prompt_logprobs is not None:
            raise InvalidRequestError(
                f"prompt_logprobs = {request.prompt_logprobs} is not part of a stream: leave it "
                "out, or set stream = false",
                "prompt_logprobs",
            )
        context.engine.check_count(num_prompts * request.n, "n" if num_prompts == 1 else "prompt")

    async def _echo(self, prompt: str | list[int], request: CompletionRequest) -> str | None:
        """The prompt's text, if it is to come first."""
        if not request.echo:
            return None
        if isinstance(prompt, str):
            return prompt
        return await self._context.engine.decode(
            prompt, skip_special_tokens=request.skip_special_tokens
        )

    def _submit(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        request: SamplingBody,
        heading: Heading,
        *,
        fill_context: bool,
    ) -> list[Generation]:
        # What is streamed is never there all at once.
        held = replace(params, logprobs=None) if request.stream else params
        top = "top_logprobs" if fill_context else "logprobs"
        check_entries(
            self._context.engine,
            prompts,
            [held] * len(prompts),
            (top, "prompt_logprobs", "max_tokens", "n"),
            fill_context=fill_context,
        )
        return self._context.engine.submit(
            prompts,
            params,
            request_id=heading.request_id,
            priority=request.priority,
            cache_salt=request.cache_salt,
            fill_context=fill_context,
        )

    def _heading(self, prefix: str, kind: str, request_id: str | None) -> Heading:
        ready = self._context.engine.ready
        name = prefix + secrets.token_hex(16)
        fields = {
            "id": name,
            "object": kind,
            "created": int(time.time()),
            "model": self._context.model_name,
            "system_fingerprint": f"minisgl-{__version__}-{ready.dtype}-{ready.device}",
        }
        return Heading(request_id or name, fields)

    def _reasoning_parser(self) -> ReasoningParser:
        """Made at the first call: the tokenizer is there once the engine has started."""
        if self._known_parser is None:
            option = self._context.config.reasoning_parser
            self._known_parser = ReasoningParser(option, self._context.engine.tokenizer)
        return self._known_parser


# -- routes ----------------------------------------------------------------------------------


MAX_REQUEST_ID = 128
RequestId = Annotated[
    str | None,
    Header(
        alias="x-request-id",
        min_length=1,
        max_length=MAX_REQUEST_ID,
        pattern="^[ -~]*$",
        description="What logs, the trace and /abort_request call the request by: printable "
        "ASCII. Comes back as a header. Default: the id of the answer.",
    ),
]
"""A parameter of routes: the id that the client chose for its request."""


def router(context: ServerContext) -> APIRouter:
    """The routes of both endpoints."""
    routes = APIRouter(tags=["OpenAI"], route_class=StrictRoute)
    service = OpenAIService(context)

    @routes.post("/v1/chat/completions", response_model=None, responses=_described(ChatCompletion))
    async def create_chat_completion(
        body: ChatCompletionRequest, request_id: RequestId = None
    ) -> Response:
        """Go on with a conversation.

        With `stream`, the answer comes as server-sent events: `chat.completion.chunk` objects
        whose choices have a `delta` in place of the `message`, then `[DONE]`.
        """
        return CallResponse(lambda: service.chat(body, request_id))

    @routes.post("/v1/completions", response_model=None, responses=_described(Completion))
    async def create_completion(body: CompletionRequest, request_id: RequestId = None) -> Response:
        """Go on with one text or several.

        With `stream`, the answer comes as server-sent events: objects of the same shape, each
        with what came next of one choice, then `[DONE]`.
        """
        return CallResponse(lambda: service.completion(body, request_id))

    return routes


def _described(model: type) -> dict[int | str, dict[str, Any]]:
    """The responses of an endpoint for `/openapi.json`."""
    errors = {
        400: "The request can't be served as it is; the message says what to change.",
        401: "No API key, or a wrong one.",
        404: "No such model.",
        413: "The body is too large.",
        500: "The engine failed on this request.",
        503: "The server is loading, full, or ending; `Retry-After` says when to try again.",
    }
    return {
        200: {"model": model, "content": STREAM_CONTENT},
        **{status: {"model": ErrorBody, "description": why} for status, why in errors.items()},
    }
