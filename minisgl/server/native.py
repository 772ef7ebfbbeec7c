"""SGLang's native API, for its benchmark and its router.

    /generate ──> NativeCall ──> Answer, one a sequence ──> everything so far, also in a stream

That a stream repeats the text from its begin is the format: a long answer takes time quadratic
in its length, where `/v1/completions` takes linear.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from typing_extensions import TypedDict

from minisgl import __version__
from minisgl.llm.requests import naming_prompt

from .context import ServerContext
from .errors import check_model, prompt_called
from .generation import Generation
from .jsonbody import StrictRoute
from .large import check_entries
from .logprobs import TokenTexts
from .native_answer import Answer, Prompt
from .native_protocol import AbortRequest, GenerateRequest
from .openai import RequestId
from .sse import STREAM_CONTENT, CallResponse
from .submitted import Submitted, aborted_on_error, merged

__all__ = ["router"]


class Aborted(TypedDict):
    """How many sequences were ended."""

    aborted: int


class ModelDescription(TypedDict):
    """The model that is served."""

    model_path: str
    """Its served name: where its files are is nobody's business."""
    tokenizer_path: str | None
    """The same; null for a model without tokenizer."""
    is_generation: bool
    max_model_len: int
    """Most tokens of prompt and output together."""
    has_image_understanding: bool
    has_audio_understanding: bool


def router(context: ServerContext) -> APIRouter:
    """The routes."""
    routes = APIRouter(route_class=StrictRoute, tags=["SGLang"])
    _add_generation(routes, context)
    _add_information(routes, context)
    return routes


def _add_generation(routes: APIRouter, context: ServerContext) -> None:
    @routes.post("/generate", response_model=None, responses={200: {"content": STREAM_CONTENT}})
    async def generate(body: GenerateRequest, request_id: RequestId = None) -> Response:
        """Go on with one prompt or several.

        Answers `{"text", "output_ids", "meta_info"}`, or a list of them for a list of prompts
        or `n` above 1; with `stream`, events of one such object each, with all there is so far,
        then `[DONE]`. In a stream of several, `index` says whose it is.
        """
        return CallResponse(lambda: _start(context, body, request_id))

    @routes.post("/abort_request")
    async def abort_request(body: AbortRequest) -> Aborted:
        """End a request, or all; one that is not there is no error."""
        return {"aborted": context.engine.abort(None if body.abort_all else body.rid)}


def _add_information(routes: APIRouter, context: ServerContext) -> None:
    @routes.get("/model_info")
    @routes.get("/get_model_info")
    async def model_info() -> ModelDescription:
        """The model that is served."""
        context.state.require_ready()
        return _model_info(context)

    @routes.get("/server_info")
    @routes.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        """The engine's options, what became of them, and its load."""
        context.state.require_ready()
        return _server_info(context)

    @routes.get("/flush_cache", response_class=PlainTextResponse)
    @routes.post("/flush_cache", response_class=PlainTextResponse)
    async def flush_cache() -> str:
        """Forget the cached prefixes that no running request reads."""
        context.state.require_ready()
        return f"Cache flushed: {await context.engine.flush_cache()} pages freed.\n"


# -- information -----------------------------------------------------------------------------


def _model_info(context: ServerContext) -> ModelDescription:
    engine = context.engine
    return {
        "model_path": engine.model,
        "tokenizer_path": None if engine.tokenizer is None else engine.model,
        "is_generation": True,
        "max_model_len": engine.ready.max_model_len,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


def _server_info(context: ServerContext) -> dict[str, Any]:
    engine, stats = context.engine, context.engine.stats
    load = {
        "num_running_reqs": 0 if stats is None else stats.num_running,
        "num_waiting_reqs": 0 if stats is None else stats.num_waiting,
        "token_usage": 0.0 if stats is None else stats.kv_cache_usage,
    }
    return {
        **vars(engine.config),
        **msgspec.structs.asdict(engine.ready),  # what "auto" and None became
        **_model_info(context),
        "served_model_name": context.model_name,
        "version": __version__,
        "tp_size": engine.config.tp,
        "dp_size": 1,
        "max_total_num_tokens": engine.ready.capacity_tokens,
        "internal_states": [load],
    }


# -- generation ------------------------------------------------------------------------------


async def _start(
    context: ServerContext, body: GenerateRequest, request_id: str | None
) -> NativeCall:
    """Check and submit a request; `request_id` is its name unless it has a `rid`."""
    engine = context.engine
    context.state.require_ready()
    check_model(None if body.model == "unknown" else body.model, context.model_name)
    params = body.params(context.config.max_n)
    prompts = body.prompts()
    engine.check_count(sum(one.n for one in params), "n" if len(prompts) == 1 else body.field)
    options: dict[str, Any] = {"priority": body.priority, "cache_salt": body.extra_key}
    with prompt_called(body.field):
        ids = []
        for index, prompt in enumerate(prompts):
            with naming_prompt(index, len(prompts)):
                ids.append(await engine.encode(prompt))
        check_entries(engine, ids, params, _LOWER, repeated=body.stream)
        if not isinstance(body.rid, list):
            name = body.rid or request_id or secrets.token_hex(16)
            made = engine.submit(ids, params, request_id=name, **options)
            with aborted_on_error(made):
                return NativeCall(name, body, made, context.token_texts)
        made = []
        with aborted_on_error(made):
            for name, prompt, one in zip(body.rid, ids, params, strict=True):
                made += engine.submit([prompt], one, request_id=name, **options)
            return NativeCall(body.rid[0], body, made, context.token_texts)


_LOWER = ("top_logprobs_num", "max_new_tokens", "n")


class NativeCall(Submitted):
    """A submitted request; see `sse.Call`."""

    def __init__(
        self,
        request_id: str,
        body: GenerateRequest,
        generations: Sequence[Generation],
        texts: TokenTexts,
    ) -> None:
        super().__init__(request_id, generations)
        self.stream = body.stream
        self._is_list = body.is_list
        self._prompts = [Prompt(generation, body, texts) for generation in generations]
        self._answers: dict[int, Answer] = {}  # by uid
        for prompt in self._prompts:
            first = prompt.generation.first_uid
            for uid in range(first, first + prompt.generation.params.n):
                index = len(self._answers) if body.is_list and body.stream else None
                self._answers[uid] = Answer(prompt, body, texts, index)

    async def response(self) -> Any:
        """The whole answer, or all of them."""
        async with aclosing(self._grown()) as turns:
            async for _ in turns:
                pass
        answers = [answer.so_far() for answer in self._answers.values()]
        return answers if self._is_list else answers[0]

    async def chunks(self) -> AsyncGenerator[list[Any], None]:
        """The answers that went on, as far as they are; one of each sequence a turn at most."""
        async with aclosing(self._grown()) as turns:
            async for uids in turns:
                yield [self._answers[uid].so_far() for uid in uids]

    async def _grown(self) -> AsyncGenerator[list[int], None]:
        """The uids of the answers that went on in each turn."""
        async with aclosing(merged(self._generations)) as arrivals:
            async for index, deltas in arrivals:
                for delta in deltas:
                    self._answers[delta.uid].add(delta)
                await self._prompts[index].prepare()
                yield list(dict.fromkeys(delta.uid for delta in deltas))
