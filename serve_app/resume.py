"""Which broken streams can be continued on another replica, and which replica may do it. Pure.

A stream is continued *exactly*: the prompt's token ids and all ids generated so far go into the new engine as one
prompt, so what follows is what would have followed. That is impossible where the rest depends on more than these
ids; ``NOT_RESUMABLE`` is that list, for people too (docs/failure.md shows it).
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from serve_app.config import ModelArgs

PATHS = frozenset(("/v1/chat/completions", "/v1/completions"))

# Fields that may stand in a request whose stream can be continued, whatever their value (``fake`` is the scripted
# engine's). A field that is in neither table is one that we know nothing of: such a request is not continued.
RESUMABLE = frozenset(
    """
    add_generation_prompt add_special_tokens allowed_token_ids cache_salt chat_template chat_template_kwargs
    continue_final_message documents fake ignore_eos include_reasoning include_stop_str_in_output logit_bias
    max_completion_tokens max_tokens messages metadata min_p min_tokens model parallel_tool_calls priority prompt
    prompt_cache_key reasoning_effort repetition_penalty request_id safety_identifier seed service_tier session_id
    skip_special_tokens spaces_between_special_tokens stop stop_token_ids store stream stream_options suffix
    temperature top_k top_p truncate_prompt_tokens truncation_side user verbosity
    """.split()  # noqa: SIM905 (words wrap, a list of strings takes a line each)
)

# Field → values with which it changes nothing, and why any other one stands in the way.
NOT_RESUMABLE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "several answers in one stream"),
    "best_of": ((1,), "several answers in one stream"),
    "use_beam_search": ((False,), "beams are not one sequence of ids"),
    "length_penalty": ((1, 1.0), "belongs to beam search"),
    "tools": (([],), "a half-written tool call has a parser's state"),
    "tool_choice": (("none", "auto"), "a half-written tool call has a parser's state"),
    "functions": (([],), "a half-written tool call has a parser's state"),
    "function_call": (("none", "auto"), "a half-written tool call has a parser's state"),
    "response_format": (({"type": "text"},), "a grammar's state depends on where the answer began"),
    "structured_outputs": ((), "a grammar's state depends on where the answer began"),
    "logprobs": ((False,), "log probabilities of what was sent are not recomputed"),
    "top_logprobs": ((0,), "log probabilities of what was sent are not recomputed"),
    "prompt_logprobs": ((), "log probabilities of what was sent are not recomputed"),
    "logprob_token_ids": (([],), "log probabilities of what was sent are not recomputed"),
    "frequency_penalty": ((0, 0.0), "counts the answer's tokens, which the new engine takes for the prompt's"),
    "presence_penalty": ((0, 0.0), "counts the answer's tokens, which the new engine takes for the prompt's"),
    "bad_words": (([],), "may span the place where the stream broke"),
    "repetition_detection": ((), "counts the answer's tokens"),
    "thinking_token_budget": ((), "counts the answer's tokens"),
    "echo": ((False,), "the prompt is part of the answer"),
    "return_token_ids": ((False,), "the ids are part of the answer"),
    "return_tokens_as_token_ids": ((False,), "the ids are part of the answer"),
    "return_token_offsets": ((False,), "offsets are part of the answer"),
    "prompt_embeds": ((), "a prompt that is not made of token ids"),
    "mm_processor_kwargs": ((), "a prompt that is not made of token ids"),
    "media_io_kwargs": ((), "a prompt that is not made of token ids"),
    "modalities": ((["text"],), "an answer that is not text"),
    "audio": ((), "an answer that is not text"),
    "kv_transfer_params": ((), "the cache lies on another engine"),
    "vllm_xargs": (({},), "arguments of plug-ins, whose state is unknown"),
}


def why_not(path: str, body: Any) -> str | None:
    """Why a stream of this request cannot be continued, in a few words; None: it can. ``body``: the parsed JSON."""
    if path not in PATHS:
        return f"{path} is not one of {', '.join(sorted(PATHS))}"
    if not isinstance(body, dict):
        return "the body is not an object"
    for field, value in body.items():
        if field in RESUMABLE or value is None:
            continue
        harmless, why = NOT_RESUMABLE.get(field, ((), "a field that is not known to be safe"))
        if not any(value is v or (value == v and isinstance(value, bool) == isinstance(v, bool)) for v in harmless):
            return f"{field}: {why}"
    prompt = body.get("prompt")
    if isinstance(prompt, list) and any(not isinstance(part, int) for part in prompt):
        return "prompt: several answers in one stream"
    messages = body.get("messages")
    if isinstance(messages, list) and any(not _only_text(message) for message in messages):
        return "messages: a prompt that is not made of token ids"
    return None


def _only_text(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return True
    kinds = [part.get("type", "text") if isinstance(part, dict) else "text" for part in content]
    return all(kind in ("text", "input_text", "output_text", "refusal", "thinking") for kind in kinds)


# Engine arguments that change how fast and where tokens are made, not which ids a text has or what follows them.
_SAME_TOKENS = frozenset(
    """
    max_num_seqs max_num_batched_tokens gpu_memory_utilization kv_cache_memory_bytes swap_space cpu_offload_gb
    enforce_eager enable_prefix_caching enable_chunked_prefill block_size max_model_len disable_log_stats
    distributed_executor_backend disable_custom_all_reduce scheduling_policy async_scheduling
    compilation_config cudagraph_capture_sizes max_seq_len_to_capture
    """.split()  # noqa: SIM905 (words wrap, a list of strings takes a line each)
)


def generation(args: ModelArgs) -> str:
    """A mark that two replicas share where one may continue what the other began: same weights, tokenizer, template
    and parsers. An unknown engine argument counts as a difference."""
    engine = {key: value for key, value in args.engine.items() if key not in _SAME_TOKENS}
    what = [args.source.model_dump(mode="json"), engine, args.frontend]
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]
