"""Parameters of OpenAI's, vLLM's and SGLang's that are taken with neutral values only.

Clients send them whether they want the feature or not; refusing all would lock those clients
out, and taking all would let a wish go by in silence.
"""

from __future__ import annotations

from .base import Neutral

__all__ = ["ENGINES", "STRUCTURED_OUTPUT", "TOOLS"]

_BOTH = (False, True)  # of a switch that means something only together with another feature

TOOLS = {
    "tools": Neutral("tool calling", ([],)),
    "tool_choice": Neutral("tool calling", ("none", "auto")),
    "parallel_tool_calls": Neutral("tool calling", _BOTH),
    "functions": Neutral("tool calling", ([],)),
    "function_call": Neutral("tool calling", ("none", "auto")),
}

STRUCTURED_OUTPUT = {
    "response_format": Neutral("structured output", ({"type": "text"},)),
    **dict.fromkeys(
        (
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_grammar",
            "guided_choice",
            "guided_decoding_backend",
            "regex",
            "ebnf",
            "json_schema",
        ),
        Neutral("structured output"),
    ),
}

ENGINES = {
    "allowed_token_ids": Neutral("allow-list of tokens"),
    "bad_words": Neutral("list of forbidden words", ([],)),
    "early_stopping": Neutral("beam search", (False,)),
    "length_penalty": Neutral("beam search", (1,)),
    "logits_processors": Neutral("logits processor of a client's", ([],)),
    "lora_path": Neutral("LoRA adapter"),
    "return_hidden_states": Neutral("output of hidden states", (False,)),
    "return_token_ids": Neutral("output of token ids", (False,)),
    "return_tokens_as_token_ids": Neutral("output of token ids", (False,)),
    "spaces_between_special_tokens": Neutral("way to leave these spaces out", (True,)),
    "truncate_prompt_tokens": Neutral("truncation of prompts"),
    "use_beam_search": Neutral("beam search", (False,)),
}
