"""What a client may ask a server about itself; and text to tokens and back.

Tokenization has vLLM's shapes. Nothing here tells a local path: a model given as one is shown by
its name alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import FailFast, Field, model_validator
from typing_extensions import TypedDict

import minisgl
from minisgl.errors import InvalidRequestError

from .context import ServerContext
from .errors import check_model
from .jsonbody import StrictRoute
from .large import apart, written
from .probe import Probe
from .protocol import Body, ChatCompletionRequest, ChatMessage
from .protocol.sampling import TokenId

__all__ = ["router"]


class Health(TypedDict):
    """The server can take requests."""

    status: Literal["ok"]


class Version(TypedDict):
    """Of the package."""

    version: str


class ModelCard(TypedDict):
    """The model that is served."""

    id: str
    """The name that requests give as `model`."""
    object: Literal["model"]
    created: int
    """Unix time of the server's start."""
    owned_by: Literal["minisgl"]
    root: str
    """The model as the server was given it; of a path, the last part."""
    max_model_len: int
    """Most tokens of prompt and output together."""


class ModelList(TypedDict):
    """All models: one."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeRequest(Body):
    """Either `prompt` or `messages`; the other parameters belong to one of them."""

    model: str | None = None
    """The served model's name."""
    prompt: str | None = None
    """The text."""
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    """A chat, which the model's template turns into text."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its BOS or EOS: by default yes for a prompt; with messages only
    false is taken, as the template has written them."""
    return_token_strs: bool = False
    """Whether to return the tokens as the vocabulary spells them, too."""
    add_generation_prompt: bool | None = None
    """With messages: end with the header of an answer. Default: unless `continue_final_message`."""
    continue_final_message: bool = False
    """With messages: leave the last one open, to be continued."""
    tools: list[dict[str, Any]] | None = None
    """With messages: tools that the model may call."""
    chat_template_kwargs: dict[str, Any] = {}
    """With messages: variables of the template, of those that the server allows."""

    def as_chat(self) -> ChatCompletionRequest:
        """The messages with what belongs to them, checked as those of a chat are."""
        return ChatCompletionRequest(
            messages=self.messages or [],
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    @model_validator(mode="after")
    def _one_form(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages")
        if self.messages is None:
            given = self.model_fields_set & {
                "add_generation_prompt",
                "continue_final_message",
                "tools",
                "chat_template_kwargs",
            }
            if given:
                raise InvalidRequestError(f"{min(given)} needs messages", min(given))
        elif self.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens = true is for a prompt: a chat template writes the special "
                "tokens itself; leave it out",
                "add_special_tokens",
            )
        return self


class Tokenized(TypedDict):
    """The tokens of a text."""

    count: int
    max_model_len: int
    """Most tokens of prompt and output together."""
    tokens: list[int]
    token_strs: list[str] | None
    """The tokens as the vocabulary spells them, when asked for."""


class DetokenizeRequest(Body):
    """Tokens to be read as text."""

    model: str | None = None
    """The served model's name."""
    tokens: Annotated[list[TokenId], FailFast()]
    """Token ids in the vocabulary."""


class Detokenized(TypedDict):
    """The text of tokens, special ones included."""

    prompt: str


def router(context: ServerContext) -> APIRouter:
    """The routes."""
    routes = APIRouter(route_class=StrictRoute, tags=["server"])
    _add_health(routes, context)
    _add_models(routes, context)
    _add_tokenization(routes, context)

    @routes.get("/version")
    async def version() -> Version:
        """The version of minisgl."""
        return {"version": minisgl.__version__}

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        text, content_type = context.metrics.render()
        return Response(text, headers={"content-type": content_type})

    return routes


# -- health ----------------------------------------------------------------------------------


def _add_health(routes: APIRouter, context: ServerContext) -> None:
    probe = Probe(context)

    @routes.head("/health", include_in_schema=False)  # as some balancers ask
    @routes.get("/health")
    async def health() -> Health:
        """Whether requests can be served now."""
        context.state.require_ready()
        return {"status": "ok"}

    @routes.get("/health_generate")
    async def health_generate() -> Health:
        """The same, tried out on one token, which callers at the same time share."""
        context.state.require_ready()
        await probe.check()
        return {"status": "ok"}


# -- models ----------------------------------------------------------------------------------


def _add_models(routes: APIRouter, context: ServerContext) -> None:
    def card() -> ModelCard:
        context.state.require_ready()
        return {
            "id": context.model_name,
            "object": "model",
            "created": context.created,
            "owned_by": "minisgl",
            "root": context.engine.model,
            "max_model_len": context.engine.ready.max_model_len,
        }

    @routes.get("/v1/models")
    async def models() -> ModelList:
        """The model that is served."""
        return {"object": "list", "data": [card()]}

    @routes.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> ModelCard:
        """The model of a name, which may have slashes."""
        found = card()
        check_model(model_id, context.model_name)
        return found


# -- tokens ----------------------------------------------------------------------------------


def _add_tokenization(routes: APIRouter, context: ServerContext) -> None:
    @routes.post("/v1/tokenize", response_model=Tokenized)
    @routes.post("/tokenize", response_model=Tokenized)
    async def tokenize(body: TokenizeRequest) -> Response:
        """The tokens of a text or of a chat."""
        context.state.require_ready()
        check_model(body.model, context.model_name)
        tokens = await _encode(context, body)

        def answer() -> bytes:
            spelled = body.return_token_strs
            shape: Tokenized = {
                "count": len(tokens),
                "max_model_len": context.engine.ready.max_model_len,
                "tokens": written(tokens),
                "token_strs": written(_spellings(context, tokens)) if spelled else None,
            }
            return msgspec.json.encode(shape)

        return Response(await apart(len(tokens), answer), media_type="application/json")

    @routes.post("/v1/detokenize")
    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        """The text of tokens."""
        context.state.require_ready()
        check_model(body.model, context.model_name)
        size = context.engine.model_info.config.vocab_size
        highest = max(body.tokens, default=0)
        if highest >= size:
            index = body.tokens.index(highest)
            raise InvalidRequestError(
                f"tokens[{index}] = {highest} is not in the vocabulary of {size}", "tokens"
            )
        return {"prompt": await context.engine.decode(body.tokens, skip_special_tokens=False)}


async def _encode(context: ServerContext, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        return await context.engine.encode(body.prompt, add_special_tokens=special)
    chat = body.as_chat()
    chat.check_template_kwargs(context.config.template_kwargs)
    return await context.engine.encode_chat(
        chat.to_messages(),
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        tools=body.tools,
        template_kwargs=chat.template_kwargs(),
    )


def _spellings(context: ServerContext, tokens: list[int]) -> Iterator[str]:
    """The vocabulary's own spelling of each token, in which a space may be "Ġ" or "▁"."""
    tokenizer = context.engine.tokenizer
    assert tokenizer is not None  # it gave the tokens
    return (tokenizer.backend.id_to_token(token) or "" for token in tokens)
