"""The tokenizer of one model: text and messages to token ids, token ids to text.

A thin layer over the Rust `tokenizers.Tokenizer`, which `folder.py` and `gguf.py` build. It is
safe to share between threads: nothing changes after loading but caches. Other threads run while
it works on a text.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ChatTemplateError, CheckpointError, InvalidRequestError, ModelNotFoundError
from .bounds import TextBound, text_bound
from .detokenize import IncrementalDetokenizer, TokenPieces
from .parts import TokenizerParts

if TYPE_CHECKING:
    from .chat_template import ChatTemplate
    from .renderer import TemplateRenderer

__all__ = ["Tokenizer"]


class Tokenizer:
    """Text to ids and back, with the same ids that transformers gives for the model.

    `special_ids` are the ids that `skip_special_tokens` leaves out; `special_tokens` the named
    ones (`"bos_token"`, ...) by text; `backend` the Rust tokenizer itself.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        backend = parts.backend
        # tokenizer.json may ask for these; a prompt is neither cut nor padded behind its back.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(parts.special_tokens)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._templates = dict(parts.templates)
        self._chat_templates: dict[str, ChatTemplate] = {}
        self._renderer: TemplateRenderer | None = None
        self._pieces = TokenPieces(backend, self.special_ids)

    @classmethod
    def load(cls, path: str) -> Tokenizer:
        """The tokenizer of a model folder or a GGUF file.

        Raises ModelNotFoundError if there is no such path, or the folder has no tokenizer (the
        model may then still be used with token ids); CheckpointError or UnsupportedModelError
        if what is there can't be used.
        """
        if os.path.isdir(path):
            from .folder import load_folder

            return cls(load_folder(path))
        if _is_gguf(path):
            from .gguf import load_gguf

            return cls(load_gguf(path))
        raise ModelNotFoundError(f"{path!r} is neither a model folder nor a GGUF file")

    @property
    def bos_token(self) -> str | None:
        """Text of the token that begins a text, if the model names one."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the token that ends a text, if the model names one."""
        return self.special_tokens.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of `bos_token`."""
        return self._id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """Id of `eos_token`; generation_config.json may list further ids that end an answer."""
        return self._id(self.eos_token)

    @property
    def chat_template(self) -> str | None:
        """Source of the model's default chat template."""
        return self._templates.get("default")

    @functools.cached_property
    def text_bound(self) -> TextBound | None:
        """How few tokens a text may have, if that is known; the first time takes a while."""
        return text_bound(self.backend)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the model's BOS or EOS where it wants them.

        Raises InvalidRequestError if `text` is no string or has lone surrogates.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"A prompt must be a string, not {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"The text has a lone surrogate, {text[error.start]!r} at position {error.start}: "
                "that is no character; remove it"
            ) from error
        # Not `encode`, which holds Python's lock and takes longer; the ids are the same.
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no character become U+FFFD.

        Ids that are no token have no text. Raises InvalidRequestError for an id that is negative
        or beyond 32 bits.
        """
        try:
            # Not `decode`, which holds Python's lock.
            [text] = self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            bad = next(index for index in ids if not 0 <= index < 1 << 32)
            raise InvalidRequestError(
                f"Token id {bad} is outside the vocabulary (0..{self.vocab_size - 1})"
            ) from error
        return str(text)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A new detokenizer for one sequence; see `detokenize.py`."""
        return IncrementalDetokenizer(self._pieces, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds in the middle of a text; empty for an id that is no token."""
        return self._pieces.raw_bytes(token_id)

    def render_with(self, renderer: TemplateRenderer | None) -> None:
        """From now on render chat templates by `renderer`; None means in this process.

        For whoever serves strangers, whose messages may make a template run for ever. The
        renderer stays the caller's to close.
        """
        self._renderer = renderer

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text for `messages`; see `ChatTemplate.render` for the parameters.

        Raises ChatTemplateError if the model has no template, or it can't render the messages;
        and what `TemplateRenderer.render` does, if there is one.
        """
        template = self._template(tools is not None)
        render: Callable[..., str] = template.render
        if self._renderer is not None:
            render = functools.partial(self._renderer.render, template)
        return render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """The ids of `apply_chat_template`; no special tokens are added, the template has them."""
        text = self.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **template_kwargs,
        )
        return self.encode(text, add_special_tokens=False)

    def save(self, folder: str) -> None:
        """Write tokenizer.json and tokenizer_config.json into `folder`, made if it isn't there.

        `Tokenizer.load` and transformers' AutoTokenizer both read them. Raises CheckpointError
        if they can't be written.
        """
        config: dict[str, Any] = {
            **self.special_tokens,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        if set(self._templates) == {"default"}:
            config["chat_template"] = self._templates["default"]
        elif self._templates:
            config["chat_template"] = [
                {"name": name, "template": text} for name, text in self._templates.items()
            ]
        path = os.path.join(folder, "tokenizer_config.json")
        try:
            os.makedirs(folder, exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                json.dump(config, file, ensure_ascii=False, indent=2)
                file.write("\n")
            self.backend.save(os.path.join(folder, "tokenizer.json"))
        except Exception as error:  # OSError, or the Rust library's plain Exception
            raise CheckpointError(f"The tokenizer can't be saved in {folder!r}: {error}") from error

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)

    def _template(self, with_tools: bool) -> ChatTemplate:
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ChatTemplateError(
                "This model has no chat template: send a prompt instead of messages, or add "
                "chat_template.jinja to the model's folder",
                "messages",
            )
        if name not in self._chat_templates:
            from .chat_template import ChatTemplate  # jinja2 is only for chat

            self._chat_templates[name] = ChatTemplate(self._templates[name], self.special_tokens)
        return self._chat_templates[name]


def _is_gguf(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False
