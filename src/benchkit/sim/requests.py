"""What a request body asks for: checked the way vLLM checks it, and turned into token ids."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import orjson

from benchkit.sim.events import Wanted, error_body
from benchkit.sim.profile import FAULTS, Profile
from benchkit.sim.tokens import ToyTokenizer, slices

DEFAULT_TEXT_MAX_TOKENS = 16


class Refusal(Exception):
    """A request that is answered with an HTTP error and an error object."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = error_body(message, status=status, kind=kind, param=param)


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body, or a Refusal."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refusal(f"the body is not JSON: {error}", kind="Bad Request", param="body") from error
    if not isinstance(body, dict):
        raise Refusal("the body is not a JSON object", kind="Bad Request", param="body")
    return body


async def read_wanted(profile: Profile, tokenizer: ToyTokenizer, body: dict[str, Any], *, chat: bool) -> Wanted:
    """What a completion request asks for; Refusal for what cannot be served."""
    check_model(profile, body)
    if chat:
        prompt_ids = await chat_ids(profile, tokenizer, body)
    else:
        prompt_ids = await prompt_to_ids(tokenizer, body.get("prompt"))
    prompt_tokens = len(prompt_ids)
    if not prompt_tokens:
        raise Refusal("the prompt is empty", param="prompt")
    if body.get("n") not in (None, 1):
        raise Refusal("n: this server makes one choice per request", param="n")

    room = profile.max_model_len - prompt_tokens
    if room < 1:
        raise Refusal(
            f"This model's maximum context length is {profile.max_model_len} tokens, and the prompt has "
            f"{prompt_tokens} already.",
            param="input_tokens",
        )
    pool_room = profile.kv_pool_tokens - prompt_tokens if profile.kv_pool_tokens else room
    max_tokens = _max_tokens(body)
    if max_tokens is None:
        max_tokens = max(1, min(room, pool_room)) if chat else DEFAULT_TEXT_MAX_TOKENS
    if max_tokens > room:
        raise Refusal(
            f"This model's maximum context length is {profile.max_model_len} tokens, but {prompt_tokens} in the "
            f"prompt and {max_tokens} in the completion make {prompt_tokens + max_tokens}.",
            param="max_tokens",
        )
    if max_tokens > pool_room:
        raise Refusal(
            f"The KV cache holds {profile.kv_pool_tokens} tokens, fewer than the {prompt_tokens + max_tokens} that "
            "this request may need.",
            param="max_tokens",
        )

    stream = _flag(body, "stream")
    options = body.get("stream_options") or {}
    if options and not stream:
        raise Refusal("stream_options needs stream = true", param="stream_options")
    if not isinstance(options, dict):
        raise Refusal("stream_options is not an object", param="stream_options")
    fault = body.get("sim_fault")
    if fault is not None and fault not in FAULTS:
        raise Refusal(f"sim_fault: expected one of {', '.join(FAULTS)}, found {fault!r}", param="sim_fault")
    return Wanted(
        chat=chat,
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        stream=stream,
        include_usage=_flag(options, "include_usage"),
        continuous_usage=_flag(options, "continuous_usage_stats"),
        ignore_eos=_flag(body, "ignore_eos"),
        token_ids=_flag(body, "return_token_ids"),
        fault=fault,
    )


def check_model(profile: Profile, body: dict[str, Any]) -> None:
    """Refusal where another model than the one served is named."""
    model = body.get("model")
    if model is not None and model != profile.model:
        raise Refusal(f"The model `{model}` does not exist.", status=404, kind="NotFoundError", param="model")


async def chat_ids(profile: Profile, tokenizer: ToyTokenizer, body: dict[str, Any]) -> list[int]:
    """The prompt that the template makes of `messages`.

    Each message is template_tokens_per_message role tokens, then its content; template_tokens_tail tokens of
    the generation prompt end it, unless add_generation_prompt is false.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal("messages: expected a list with at least one message", param="messages")
    ids: list[int] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refusal("messages: each one needs a role", param="messages")
        ids += [tokenizer.special(f"<{message['role']}:{i}>") for i in range(profile.template_tokens_per_message)]
        ids += await text_ids(tokenizer, _content(message.get("content")))
    if _flag(body, "add_generation_prompt", default=True):
        ids += [tokenizer.special(f"<answer:{i}>") for i in range(profile.template_tokens_tail)]
    return ids


async def prompt_to_ids(tokenizer: ToyTokenizer, prompt: object) -> list[int]:
    """The ids of a completion's prompt: a text, a list of ids, or a list of one of these."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return await text_ids(tokenizer, prompt)
    return checked_ids(prompt, param="prompt")


def checked_ids(ids: object, *, param: str) -> list[int]:
    """The list itself, if it is one of token ids; else a Refusal."""
    if isinstance(ids, list):
        try:
            # Signed refuses what is not below ID_LIMIT, unsigned what is negative: far cheaper than a look at each.
            array("i", ids), array("I", ids)
            return ids
        except (TypeError, OverflowError):
            pass
    raise Refusal(f"{param}: expected a text or a list of token ids below 2^31", param=param)


async def text_ids(tokenizer: ToyTokenizer, text: str) -> list[int]:
    """The ids of a text, made in slices, so that a long prompt delays no other stream's events."""
    ids: list[int] = []
    for part in slices(text):
        ids += tokenizer.encode(part)
        await asyncio.sleep(0)
    return ids


def _content(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
    raise Refusal("messages: content is neither a text nor a list of text parts", param="messages")


def _max_tokens(body: dict[str, Any]) -> int | None:
    for key in ("max_completion_tokens", "max_tokens"):
        value = body.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Refusal(f"{key} must be an integer of at least 1, got {value!r}.", param=key)
        return value
    return None


def _flag(body: dict[str, Any], key: str, *, default: bool = False) -> bool:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise Refusal(f"{key}: expected true or false, found {value!r}", param=key)
    return value
