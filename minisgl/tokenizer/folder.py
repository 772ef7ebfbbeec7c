"""A tokenizer from a Hugging Face model folder.

    tokenizer.json            vocabulary, merges, pre-tokenizer, post-processor, added tokens
    tokenizer_config.json     names of the special tokens, further added tokens, chat template
    special_tokens_map.json   older place of the special tokens' names
    chat_template.jinja       chat template; it goes before the one in tokenizer_config.json
    additional_chat_templates/NAME.jinja

`add_bos_token` and `add_eos_token` of tokenizer_config.json are not read: beside a
tokenizer.json, whose post-processor says the same, transformers 5 drops them too.
"""

from __future__ import annotations

import json
import os
from typing import Any

import tokenizers

from ..errors import CheckpointError, ModelNotFoundError
from .parts import TOKEN_NAMES, TokenizerParts, token_text

__all__ = ["load_folder"]

_OTHER_FORMATS = ("tokenizer.model", "vocab.json", "tekken.json", "vocab.txt")


def load_folder(folder: str) -> TokenizerParts:
    """Read the tokenizer in `folder`.

    Raises ModelNotFoundError if the folder holds no tokenizer, CheckpointError if its files
    can't be read or understood.
    """
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.isfile(path):
        return _load_other_format(folder)
    try:
        backend = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} is not a tokenizer that can be read: {error}") from error
    config = _read_json(folder, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_json(folder, "special_tokens_map.json")
    special_tokens = {}
    for name in TOKEN_NAMES:
        text = token_text(config.get(name))
        if text is not None:
            special_tokens[name] = text
    _add_missing_tokens(backend, config, special_tokens)
    return TokenizerParts(backend, special_tokens, _chat_templates(folder, config))


def _load_other_format(folder: str) -> TokenizerParts:
    """Let transformers convert an older format; it takes seconds to import, hence only here."""
    found = [name for name in _OTHER_FORMATS if os.path.isfile(os.path.join(folder, name))]
    if not found:
        raise ModelNotFoundError(
            f"No tokenizer in {folder!r}: looked for tokenizer.json, {', '.join(_OTHER_FORMATS)}; "
            "add one, or pass token ids instead of text"
        )
    try:
        from transformers import AutoTokenizer

        source: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        backend = source.backend_tokenizer
    except Exception as error:  # whatever transformers or a converter it needs may raise
        raise CheckpointError(
            f"The tokenizer in {folder!r} ({', '.join(found)}) can't be converted by transformers "
            f"({type(error).__name__}: {error}); add a tokenizer.json"
        ) from error
    templates = _named_templates(source.chat_template)
    return TokenizerParts(backend, dict(source.special_tokens_map), templates)


def _read_json(folder: str, name: str) -> dict[str, Any]:
    """The JSON object in a file of the folder, or an empty one if there is no such file."""
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]
) -> None:
    """Add the tokens that only the config knows, in the order transformers adds them.

    First those listed with an id, by id, then named ones. A token that tokenizer.json has with
    other flags (`special`, `lstrip`, ...) takes the config's.
    """
    known = backend.get_added_tokens_decoder().values()
    spelled = {repr(token) for token in known}
    listed = _listed_tokens(config)
    added = [token for token in listed if repr(token) not in spelled]
    texts = {token.content for token in [*known, *added]}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    names = [*special_tokens.values(), *(token_text(value) for value in extra)]
    for text in names:
        if text is not None and text not in texts:
            texts.add(text)
            added.append(tokenizers.AddedToken(text, special=True, normalized=False))
    if added:
        backend.add_tokens(added)


def _listed_tokens(config: dict[str, Any]) -> list[tokenizers.AddedToken]:
    """The entries of `added_tokens_decoder` by ascending id."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    tokens = []
    try:
        entries = config.get("added_tokens_decoder") or {}
        for _, entry in sorted(entries.items(), key=lambda item: int(item[0])):
            given = {name: bool(entry[name]) for name in flags if name in entry}
            tokens.append(tokenizers.AddedToken(entry["content"], **given))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"added_tokens_decoder in tokenizer_config.json is malformed: {error!r}"
        ) from error
    return tokens


def _chat_templates(folder: str, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name; those in files of their own replace the ones in the config."""
    files = {"default": os.path.join(folder, "chat_template.jinja")}
    extra = os.path.join(folder, "additional_chat_templates")
    if os.path.isdir(extra):
        for name in sorted(os.listdir(extra)):
            if name.endswith(".jinja"):
                files[name.removesuffix(".jinja")] = os.path.join(extra, name)
    templates = {}
    for name, path in files.items():
        if os.path.isfile(path):
            try:
                with open(path, encoding="utf-8") as file:
                    templates[name] = file.read()
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{path} can't be read: {error}") from error
    return templates or _named_templates(config.get("chat_template"))


def _named_templates(value: Any) -> dict[str, str]:
    """A config's `chat_template`: a string, a dict, or a list of `{name, template}`."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        value = {
            entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)
        }
    if not isinstance(value, dict):
        return {}
    return {
        name: text
        for name, text in value.items()
        if isinstance(name, str) and isinstance(text, str)
    }
