"""Tokenizers: ids equal to transformers', from folders and GGUF files, and back to disk."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from minisgl.errors import (
    ChatTemplateError,
    CheckpointError,
    InvalidRequestError,
    ModelNotFoundError,
)
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer.parts import TokenizerParts

PROSE = [
    "",
    " ",
    "Hello, world!",
    "  It's   two  spaces; isn't it?\n\n\tTabs\r\n",
    "Über naïve façades — “quoted” … 中文字符 и русский नमस्ते 😀👍🏽 e\u0301",
    "def f(x):\n    return x if x else None  # <tag> & more\n",
    "a<|im_start|>user\nhi<|im_end|> b<|endoftext|>",
]
SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "What is love? <|im_end|>"}
ANSWER = {"role": "assistant", "content": "Baby don't hurt me."}
CHATS = [[USER], [SYSTEM, USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER], [SYSTEM]]


@pytest.fixture(scope="module")
def demo(demo_model_path: Path) -> Tokenizer:
    return Tokenizer.load(str(demo_model_path))


@pytest.fixture(scope="module")
def reference(demo_model_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(demo_model_path.parent), gguf_file=demo_model_path.name
    )


# ---- the demo model's GGUF file ---------------------------------------------------------------


@pytest.mark.parametrize("text", PROSE)
def test_gguf_ids_equal_transformers(demo: Tokenizer, reference: Any, text: str) -> None:
    ids = demo.encode(text)
    assert ids == reference(text).input_ids
    for skip in (True, False):
        assert demo.decode(ids, skip_special_tokens=skip) == reference.decode(
            ids, skip_special_tokens=skip
        )


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_equals_transformers(
    demo: Tokenizer, reference: Any, messages: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    want = reference.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
    assert demo.apply_chat_template(messages, **options) == want
    want_ids = reference(want, add_special_tokens=False).input_ids
    assert demo.encode_chat(messages, **options) == want_ids


def test_continue_final_message_equals_transformers(demo: Tokenizer, reference: Any) -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    want = reference.apply_chat_template([USER, ANSWER], tokenize=False, **options)
    assert demo.apply_chat_template([USER, ANSWER], **options) == want
    assert want.endswith("hurt me.")


def test_smollm_splits_digits(demo: Tokenizer) -> None:
    """The published tokenizer cuts numbers into single digits; ids 32..41 are "0".."9"."""
    assert [demo.backend.id_to_token(index) for index in range(32, 42)] == list("0123456789")
    assert demo.encode("12345") == [33, 34, 35, 36, 37]
    space = demo.backend.token_to_id("Ġ")
    assert demo.encode("in 1984") == [*demo.encode("in"), space, 33, 41, 40, 36]


def test_demo_attributes(demo: Tokenizer) -> None:
    assert demo.vocab_size == 49152
    assert (demo.bos_token, demo.bos_token_id) == ("<|im_start|>", 1)
    assert (demo.eos_token, demo.eos_token_id) == ("<|im_end|>", 2)
    assert demo.special_ids == frozenset(range(17))
    assert demo.chat_template is not None and "SmolLM" in demo.chat_template
    assert demo.token_bytes(demo.encode(" hello")[0]) == b" hello"
    assert demo.decode([49152, 10**9]) == ""


def test_bad_text_and_ids_are_refused(demo: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="position 1"):
        demo.encode("a\ud83d")
    with pytest.raises(InvalidRequestError, match="string"):
        demo.encode(5)  # type: ignore[arg-type]
    for index in (-1, 1 << 32):
        with pytest.raises(InvalidRequestError, match=str(index)):
            demo.decode([3, index])


def test_other_threads_run_meanwhile(demo: Tokenizer) -> None:
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        text = "".join(PROSE) * 2000
        before = ticks[0]
        ids = demo.encode(text)
        during_encode = ticks[0] - before
        before = ticks[0]
        demo.decode(ids * 8)  # else a busy machine could be over with it before a tick
        during_decode = ticks[0] - before
    finally:
        done.set()
        thread.join()
    assert min(during_encode, during_decode) > 5  # it would be 0 or 1


def test_ids_and_text_equal_those_of_the_simple_calls(demo: Tokenizer) -> None:
    for text in [*PROSE, "".join(PROSE) * 100]:
        for special in (True, False):
            ids = demo.encode(text, add_special_tokens=special)
            assert ids == demo.backend.encode(text, add_special_tokens=special).ids
        assert demo.decode(ids) == demo.backend.decode(ids)


def test_messages_is_no_template_variable(demo: Tokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="messages"):
        demo.apply_chat_template([USER], messages=[ANSWER])


def test_import_needs_neither_torch_nor_transformers(demo_model_path: Path) -> None:
    program = (
        "import sys\nfrom minisgl.tokenizer import Tokenizer\n"
        "t = Tokenizer.load(sys.argv[1])\n"
        "t.encode_chat([{'role': 'user', 'content': 'hi'}])\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(demo_model_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert result.stdout.strip() == "[]"


# ---- saving -----------------------------------------------------------------------------------


def test_saved_folder_loads_here_and_in_transformers(demo: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = str(tmp_path / "made")
    demo.save(folder)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.special_tokens == demo.special_tokens == theirs.special_tokens_map
    assert ours.special_ids == demo.special_ids == set(theirs.all_special_ids) | demo.special_ids
    assert ours.chat_template == demo.chat_template == theirs.chat_template
    assert ours.vocab_size == len(theirs) == 49152
    for text in [*PROSE, "in 1984, 12,345.678"]:
        assert ours.encode(text) == demo.encode(text) == theirs(text).input_ids
    for messages in CHATS:
        want = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ours.encode_chat(messages) == demo.encode_chat(messages) == want


# ---- folders ----------------------------------------------------------------------------------


def small_backend() -> Backend:
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"he": 256, "hel": 257, "<s>": 258, "</s>": 259}
    backend = Backend(models.BPE(vocabulary, [("h", "e"), ("he", "l")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def write_folder(folder: Path, backend: Backend, **config: Any) -> str:
    backend.save(str(folder / "tokenizer.json"))
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def check_against_transformers(folder: str, texts: list[str]) -> Tokenizer:
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in texts:
        for special in (True, False):
            want = theirs(text, add_special_tokens=special).input_ids
            assert ours.encode(text, add_special_tokens=special) == want
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map
    return ours


TEXTS = ["hello <s>he</s> <pad>", "<think> he </think>", "", "é<extra>"]


def test_add_bos_in_the_config_is_treated_as_transformers_does(tmp_path: Path) -> None:
    backend = small_backend()
    folder = write_folder(tmp_path, backend, bos_token="<s>", add_bos_token=True)
    assert check_against_transformers(folder, TEXTS).encode("he") == [256]
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 258)]
    )
    folder = write_folder(tmp_path, backend, bos_token="<s>", add_bos_token=False)
    assert check_against_transformers(folder, TEXTS).encode("he") == [258, 256]


def test_tokens_that_only_the_config_has(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        small_backend(),
        bos_token={"__type": "AddedToken", "content": "<s>", "lstrip": False},
        pad_token="<pad>",
        unk_token=None,
        additional_special_tokens=["<extra>"],
        added_tokens_decoder={
            "261": {"content": "</think>", "special": False, "normalized": False},
            "260": {"content": "<think>", "special": False, "lstrip": True, "rstrip": True},
            "259": {"content": "</s>", "special": True, "lstrip": True},
        },
    )
    tokenizer = check_against_transformers(folder, TEXTS)
    assert tokenizer.backend.token_to_id("</think>") == 261
    assert tokenizer.special_tokens == {"bos_token": "<s>", "pad_token": "<pad>"}
    assert tokenizer.eos_token is None and tokenizer.eos_token_id is None


def test_special_tokens_map_is_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, small_backend(), bos_token="</s>")
    entry = {"content": "</s>", "lstrip": False, "rstrip": False, "normalized": False}
    names = {"bos_token": "<s>", "eos_token": entry}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = check_against_transformers(folder, TEXTS)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (258, 259)


def test_truncation_and_padding_are_off(tmp_path: Path) -> None:
    backend = small_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.load(write_folder(tmp_path, backend))
    assert len(tokenizer.encode("xyzxyz")) == 6
    assert len(tokenizer.encode("x")) == 1


def test_chat_template_places(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = write_folder(tmp_path, small_backend(), chat_template=named)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.chat_template == "D"
    assert tokenizer.apply_chat_template([USER]) == "D"
    assert tokenizer.apply_chat_template([USER], tools=[{}]) == "T"
    tokenizer.save(str(tmp_path / "again"))
    assert Tokenizer.load(str(tmp_path / "again")).apply_chat_template([USER], tools=[{}]) == "T"
    assert (
        Tokenizer.load(write_folder(tmp_path, small_backend(), chat_template="C")).chat_template
        == "C"
    )
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}J", encoding="utf-8")
    assert Tokenizer.load(folder).chat_template == "{{ bos_token }}J"


def test_no_chat_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, small_backend()))
    assert tokenizer.chat_template is None
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.apply_chat_template([USER])


def test_older_format_through_transformers(tmp_path: Path) -> None:
    backend = small_backend()
    backend.model.save(str(tmp_path))  # vocab.json and merges.txt
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": "<s>"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = check_against_transformers(str(tmp_path), ["hello he", "<s>hel</s>"])
    assert tokenizer.encode("hello") == backend.encode("hello").ids


def test_folders_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="tokenizer.json"):
        Tokenizer.load(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        Tokenizer.load(str(tmp_path / "nowhere"))
    (tmp_path / "tokenizer.model").write_bytes(b"no protobuf")
    with pytest.raises(CheckpointError, match="tokenizer.model"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer.json"):
        Tokenizer.load(str(tmp_path))
    small_backend().save(str(tmp_path / "tokenizer.json"))
    for text in ("[]", "{", '{"added_tokens_decoder": {"x": 1}}'):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(CheckpointError, match="tokenizer_config.json"):
            Tokenizer.load(str(tmp_path))


def test_added_tokens_survive_a_save(tmp_path: Path) -> None:
    backend = small_backend()
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    Tokenizer(TokenizerParts(backend)).save(str(tmp_path))
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.encode("he<think>") == [256, 260]
    assert tokenizer.decode([256, 260]) == "he<think>"
