"""A tokenizer from the metadata of a GGUF file.

Two kinds of vocabulary occur (`tokenizer.ggml.model`):

- "gpt2": byte-level BPE with its merges. How text is cut before merging isn't stored, only a
  name for it (`tokenizer.ggml.pre`), so the cuts of the names known are here.
- "llama": sentencepiece BPE. There are scores instead of merges: the adjacent pair whose
  concatenation has the highest score is joined first, which is the same as merges ranked by
  the score of their result.

Sources: the keys in ggml `docs/gguf.md`; token types in `gguf.TokenType`; the regular
expressions are those of the models' published tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from ..utils.gguf_header import read_gguf_header
from .parts import TokenizerParts

__all__ = ["load_gguf"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = _QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def load_gguf(path: str) -> TokenizerParts:
    """Read the tokenizer of the GGUF file at `path`.

    Raises ModelNotFoundError if the file has no tokenizer, UnsupportedModelError for a kind of
    vocabulary or a pre-tokenizer that is not known (naming those that are), CheckpointError if
    the metadata is incomplete or contradicts itself.
    """
    metadata = read_gguf_header(path, with_tokenizer=True).metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        raise ModelNotFoundError(
            f"No tokenizer in {path}: tokenizer.ggml.model is {kind or 'absent'}; use token ids, "
            "or the model's Hugging Face folder"
        )
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if not isinstance(kind, str) or kind not in builders:
        raise UnsupportedModelError(
            f"{path}: tokenizer.ggml.model = {kind!r} is not supported, only "
            f"{', '.join(builders)}; use the model's Hugging Face folder"
        )
    try:
        backend = builders[kind](path, metadata)
        special_tokens = _special_tokens(path, metadata)
        _add_tokens(path, metadata, backend)
        _add_post_processor(metadata, backend, special_tokens)
    except (CheckpointError, UnsupportedModelError):
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise CheckpointError(f"{path}: its tokenizer can't be built: {error}") from error
    return TokenizerParts(backend, special_tokens, _templates(metadata))


def _list(path: str, metadata: dict[str, Any], name: str) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise CheckpointError(
            f"{path}: the key tokenizer.ggml.{name} is missing or no array; the file has no "
            "complete tokenizer, use another"
        )
    return list(value)


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Ids by text. Of equal texts the first keeps its id, the others can't be produced."""
    count = len(tokens)
    return dict(zip(reversed(tokens), range(count - 1, -1, -1), strict=True))


def _token_types(path: str, metadata: dict[str, Any], count: int) -> list[int]:
    if "tokenizer.ggml.token_type" not in metadata:
        return [_NORMAL] * count
    types = _list(path, metadata, "token_type")
    if len(types) != count:
        raise CheckpointError(f"{path}: {len(types)} token types for {count} tokens")
    return types


# ---- byte-level BPE ---------------------------------------------------------------------------


def _cut_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _cut_smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _cut_gpt2()])


def _cut_words(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _cut_qwen2() -> pre_tokenizers.PreTokenizer:
    return _cut_words(_QWEN2_WORDS)


def _cut_llama3() -> pre_tokenizers.PreTokenizer:
    return _cut_words(_LLAMA3_WORDS)


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _cut_gpt2,
    "gpt-2": _cut_gpt2,
    "smollm": _cut_smollm,
    "qwen2": _cut_qwen2,
    "deepseek-r1-qwen": _cut_qwen2,
    "llama-bpe": _cut_llama3,
}


def _byte_level(path: str, metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{path}: tokenizer.ggml.pre = {name!r} is not supported, only "
            f"{', '.join(_PRE_TOKENIZERS)}; use the model's Hugging Face folder"
        )
    vocabulary = _vocabulary(_list(path, metadata, "tokens"))
    merges = _pairs(path, _list(path, metadata, "merges"))
    # Llama 3's vocabulary has words that no sequence of merges reaches.
    model = models.BPE(vocabulary, merges, ignore_merges=name == "llama-bpe")
    backend = tokenizers.Tokenizer(model)
    if _PRE_TOKENIZERS[name] is _cut_qwen2:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[name]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pairs(path: str, merges: list[str]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise CheckpointError(
                f"{path}: the merge {merge!r} is not two tokens with a space between"
            )
        pairs.append((left, right))
    return pairs


# ---- sentencepiece BPE ------------------------------------------------------------------------


def _sentencepiece(path: str, metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    tokens = _list(path, metadata, "tokens")
    vocabulary = _vocabulary(tokens)
    if "tokenizer.ggml.merges" in metadata:
        merges = _pairs(path, _list(path, metadata, "merges"))
    else:
        scores = _list(path, metadata, "scores")
        if len(scores) != len(tokens):
            raise CheckpointError(f"{path}: {len(scores)} scores for {len(tokens)} tokens")
        types = _token_types(path, metadata, len(tokens))
        merges = _merges_from_scores(vocabulary, scores, types)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    unknown_token = None if unknown is None else _token(path, tokens, unknown, "unknown_token_id")
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True)
    )
    add_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first" if add_space else "never", split=False
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space:
        parts.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(parts)
    return backend


def _merges_from_scores(
    vocabulary: dict[str, int], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """Every way to make a normal token out of two tokens, best score first.

    The ways to make one token are ordered by the ids of their halves (as transformers does).
    """
    ranked = []
    for token, index in vocabulary.items():
        if types[index] not in (_NORMAL, _UNUSED):
            continue  # control, byte and user-defined tokens never come out of a merge
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], index, left, right, cut, token))
    ranked.sort()
    return [(token[:cut], token[cut:]) for *_, cut, token in ranked]


# ---- special tokens, templates ----------------------------------------------------------------


def _token(path: str, tokens: list[str], index: Any, name: str) -> str:
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise CheckpointError(
            f"{path}: tokenizer.ggml.{name} = {index!r} is outside the vocabulary "
            f"(0..{len(tokens) - 1})"
        )
    return tokens[index]


def _special_tokens(path: str, metadata: dict[str, Any]) -> dict[str, str]:
    tokens = _list(path, metadata, "tokens")
    keys = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    return {
        name: _token(path, tokens, metadata[f"tokenizer.ggml.{key}"], key)
        for name, key in keys.items()
        if f"tokenizer.ggml.{key}" in metadata
    }


def _add_tokens(path: str, metadata: dict[str, Any], backend: tokenizers.Tokenizer) -> None:
    """Make control and user-defined tokens whole: text is searched for them before any cut."""
    tokens = _list(path, metadata, "tokens")
    types = _token_types(path, metadata, len(tokens))
    backend.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED) and token
        ]
    )


def _add_post_processor(
    metadata: dict[str, Any], backend: tokenizers.Tokenizer, special_tokens: dict[str, str]
) -> None:
    """Put BOS before and EOS after a text where the file says so.

    A file that doesn't say: BOS for sentencepiece and for Llama 3, whose tokenizers add it.
    """
    adds_bos_by_default = (
        metadata["tokenizer.ggml.model"] == "llama"
        or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    )
    bos, eos = special_tokens.get("bos_token"), special_tokens.get("eos_token")
    before = [bos] if metadata.get("tokenizer.ggml.add_bos_token", adds_bos_by_default) else []
    after = [eos] if metadata.get("tokenizer.ggml.add_eos_token", False) else []
    used = [token for token in (*before, *after) if token is not None]
    if not used:
        return
    template = [*(t for t in before if t), "$A", *(t for t in after if t)]
    backend.post_processor = processors.TemplateProcessing(
        single=template,
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(used)],
    )


def _templates(metadata: dict[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template`, and `tokenizer.chat_template.NAME` for further ones."""
    key = "tokenizer.chat_template"
    templates = {
        name.removeprefix(key + "."): text
        for name, text in metadata.items()
        if name.startswith(key + ".") and isinstance(text, str)
    }
    if isinstance(metadata.get(key), str):
        templates["default"] = metadata[key]
    return templates
