"""Bodies of /v1/chat/completions and /v1/completions, checked and made into settings.

Every field is honoured, accepted because ignoring it does no harm, or refused by name; a field
that OpenAI's schema does not know is refused too, save for the sampling fields that users of vLLM
know.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from prfaas.errors import BadRequest
from prfaas.server.openai.fields import Fields, shown
from prfaas.server.openai.messages import Message, parse_messages, parse_tools
from prfaas.types import SamplingParams

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_BIASED_TOKENS = 1024
MAX_MODEL_CHARS = 256
MAX_SALT_CHARS = 256
MAX_TOKENS = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's /v1/completions gives when max_tokens is unset; a chat gets the whole context."""

_SHARED = {
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "n",
    "stream", "stream_options", "cache_salt", "max_tokens", "logprobs",
}  # fmt: skip
_HARMLESS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "parallel_tool_calls", "prediction",
}  # fmt: skip
_CHAT = _SHARED | _HARMLESS | {
    "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "modalities",
    "response_format",
}  # fmt: skip
_COMPLETION = _SHARED | {"user", "prompt", "echo", "best_of"}
_REFUSED_CHAT = {
    "audio": "is not supported: the model writes text only",
    "web_search_options": "is not supported",
    "moderation": "is not supported",
    "functions": "is deprecated and not supported: use tools",
    "function_call": "is deprecated and not supported: use tool_choice",
    "reasoning_effort": "is not supported",
    "verbosity": "is not supported",
    "chat_template": "cannot be set by a request",
    "chat_template_kwargs": "cannot be set by a request",
    "tokenizer": "cannot be set by a request",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What the bounds of some fields depend on."""

    vocab_size: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What both endpoints share, once checked."""

    sampling: SamplingParams
    """Its max_tokens means nothing: `sampling_within` sets it."""
    max_tokens: int | None
    """None: as many as the context has room for."""
    max_tokens_param: str
    """The field that set it, for complaints."""
    stops: tuple[str, ...]
    num_choices: int
    is_stream: bool
    includes_usage: bool
    num_logprobs: int | None
    cache_salt: bytes

    def sampling_within(
        self, *, prompt_tokens: int, max_context_tokens: int, prompt_param: str
    ) -> SamplingParams:
        """Return the parameters for a prompt of that length.

        Raises BadRequest where prompt and max_tokens do not fit the context together; nothing is
        ever cut.
        """
        room = max_context_tokens - prompt_tokens
        wanted = 1 if self.max_tokens is None else self.max_tokens
        if wanted > room:
            asked = "" if self.max_tokens is None else f" and {self.max_tokens_param} is {wanted}"
            raise BadRequest(
                f"the prompt has {prompt_tokens} tokens{asked}, but the context holds"
                f" {max_context_tokens} tokens, at least one of them drawn",
                param=prompt_param if self.max_tokens is None else self.max_tokens_param,
                code="context_length_exceeded",
            )
        max_tokens = room if self.max_tokens is None else self.max_tokens
        return replace(self.sampling, max_tokens=max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A body of /v1/chat/completions."""

    settings: Settings
    messages: list[Message]
    tools: list[Message] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A body of /v1/completions; each prompt is text or token ids."""

    settings: Settings
    prompts: tuple[str | tuple[int, ...], ...]
    is_echo: bool


def parse_model(body: dict[str, object]) -> str:
    """Return the model's name."""
    fields = Fields(body)
    name = fields.raw("model")
    if name is None:
        raise fields.wrong("model", "is required")
    return fields.string("model", max_chars=MAX_MODEL_CHARS) or ""


def parse_chat(
    body: dict[str, object], limits: ModelLimits, draw_seed: Callable[[], int]
) -> ChatRequest:
    """Return the checked request, or raise BadRequest naming the field."""
    fields = Fields(body)
    fields.refuse(_REFUSED_CHAT)
    fields.refuse_unknown(_CHAT)
    _check_output_kind(fields)
    num_logprobs = _chat_logprobs(fields)
    name = "max_completion_tokens"
    old = fields.integer("max_tokens", low=1, high=MAX_TOKENS)
    max_tokens = fields.integer(name, low=1, high=MAX_TOKENS)
    if max_tokens is None:
        max_tokens, name = old, "max_tokens"
    settings = _settings(fields, limits, draw_seed, num_logprobs, max_tokens, name)
    return ChatRequest(
        settings=settings, messages=parse_messages(fields), tools=parse_tools(fields)
    )


def parse_completion(
    body: dict[str, object], limits: ModelLimits, draw_seed: Callable[[], int]
) -> CompletionRequest:
    """Return the checked request, or raise BadRequest naming the field."""
    fields = Fields(body)
    fields.refuse({"suffix": "is not supported: the model does not fill in"})
    fields.refuse_unknown(_COMPLETION)
    is_echo = fields.boolean("echo")
    num_logprobs = fields.integer("logprobs", low=0, high=5)
    if is_echo and num_logprobs is not None:
        raise fields.wrong("logprobs", "cannot be combined with echo: the prompt's are not kept")
    num_choices = fields.integer("n", low=1, high=MAX_CHOICES) or 1
    best_of = fields.integer("best_of", low=1, high=MAX_CHOICES)
    if best_of is not None and best_of != num_choices:
        raise fields.wrong("best_of", f"is {best_of}, must equal n, which is {num_choices}")
    max_tokens = fields.integer("max_tokens", low=1, high=MAX_TOKENS) or DEFAULT_COMPLETION_TOKENS
    settings = _settings(fields, limits, draw_seed, num_logprobs, max_tokens, "max_tokens")
    return CompletionRequest(
        settings=settings, prompts=_prompts(fields, limits.vocab_size), is_echo=is_echo
    )


def _settings(
    fields: Fields,
    limits: ModelLimits,
    draw_seed: Callable[[], int],
    num_logprobs: int | None,
    max_tokens: int | None,
    max_tokens_param: str,
) -> Settings:
    is_stream = fields.boolean("stream")
    salt = fields.string("cache_salt", max_chars=MAX_SALT_CHARS)
    return Settings(
        sampling=_sampling(fields, limits, draw_seed, num_logprobs),
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        stops=_stops(fields),
        num_choices=fields.integer("n", low=1, high=MAX_CHOICES) or 1,
        is_stream=is_stream,
        includes_usage=_includes_usage(fields, is_stream),
        num_logprobs=num_logprobs,
        cache_salt=b"" if salt is None else salt.encode(),
    )


def _sampling(
    fields: Fields,
    limits: ModelLimits,
    draw_seed: Callable[[], int],
    num_logprobs: int | None,
) -> SamplingParams:
    seed = fields.integer("seed", low=-(2**63), high=2**64 - 1)
    top_p = _or(fields.number("top_p", low=0, high=1), 1.0)
    top_k = fields.integer("top_k", low=-1, high=MAX_TOKENS)
    if top_p == 0:  # the nucleus of nothing is the most likely token
        top_p, top_k = 1.0, 1
    if top_k is not None and top_k <= 0:  # vLLM's and llama.cpp's ways to say "all"
        top_k = None
    eos_ids = () if fields.boolean("ignore_eos") else limits.eos_ids
    stop_ids = _token_ids(fields, "stop_token_ids", limits.vocab_size, MAX_STOPS)
    return SamplingParams(
        max_tokens=1,
        seed=(draw_seed() if seed is None else seed) % 2**64,
        temperature=_or(fields.number("temperature", low=0, high=2), 1.0),
        top_p=top_p,
        top_k=top_k,
        min_p=_or(fields.number("min_p", low=0, high=1), 0.0),
        presence_penalty=_or(fields.number("presence_penalty", low=-2, high=2), 0.0),
        frequency_penalty=_or(fields.number("frequency_penalty", low=-2, high=2), 0.0),
        repetition_penalty=_or(fields.number("repetition_penalty", low=0, high=10, above=0), 1.0),
        logit_bias=_logit_bias(fields, limits.vocab_size),
        num_logprobs=num_logprobs,
        stop_token_ids=tuple(dict.fromkeys((*eos_ids, *stop_ids))),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise fields.wrong("stop", f"must be a string or a list of strings, not {shown(value)}")
    if len(value) > MAX_STOPS:
        raise fields.wrong("stop", f"has {len(value)} strings, the limit is {MAX_STOPS}")
    for stop in value:
        if not isinstance(stop, str) or not stop:
            raise fields.wrong("stop", f"must hold non-empty strings, not {shown(stop)}")
        if len(stop) > MAX_STOP_CHARS:
            raise fields.wrong("stop", f"has {len(stop)} characters, the limit is {MAX_STOP_CHARS}")
    return tuple(value)


def _includes_usage(fields: Fields, is_stream: bool) -> bool:
    options = fields.mapping("stream_options")
    if options is None:
        return False
    if not is_stream:
        raise fields.wrong("stream_options", "is only allowed when stream is true")
    inner = Fields(options, "stream_options.")
    inner.refuse_unknown({"include_usage", "include_obfuscation"})
    inner.boolean("include_obfuscation")
    return inner.boolean("include_usage")


def _chat_logprobs(fields: Fields) -> int | None:
    is_wanted = fields.boolean("logprobs")
    num_top = fields.integer("top_logprobs", low=0, high=20)
    if num_top is not None and not is_wanted:
        raise fields.wrong("top_logprobs", "is only allowed when logprobs is true")
    return (num_top or 0) if is_wanted else None


def _check_output_kind(fields: Fields) -> None:
    modalities = fields.raw("modalities")
    if modalities is not None and modalities != ["text"]:
        raise fields.wrong("modalities", f"only ['text'] is supported, not {shown(modalities)}")
    response_format = fields.mapping("response_format")
    if response_format is not None and response_format.get("type") != "text":
        kind = shown(response_format.get("type"))
        raise fields.wrong("response_format", f"only type text is supported, not {kind}")


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    bias = fields.mapping("logit_bias") or {}
    if len(bias) > MAX_BIASED_TOKENS:
        raise fields.wrong(
            "logit_bias", f"has {len(bias)} tokens, the limit is {MAX_BIASED_TOKENS}"
        )
    inner = Fields(bias, "logit_bias.")
    pairs: dict[int, float] = {}
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise fields.wrong(
                "logit_bias", f"{shown(key)} is no token id, the vocabulary has {vocab_size}"
            )
        value = inner.number(key, low=-100, high=100)
        if value is not None:
            pairs[int(key)] = value
    return tuple(sorted(pairs.items()))


def _token_ids(fields: Fields, name: str, vocab_size: int, max_items: int) -> Sequence[int]:
    values = fields.items(name, max_items=max_items) or []
    return checked_ids(fields, name, values, vocab_size)


def checked_ids(
    fields: Fields, name: str, values: Sequence[object], vocab_size: int
) -> tuple[int, ...]:
    """Return `values` as token ids below `vocab_size`, or raise BadRequest."""
    if set(map(type, values)) <= {int}:
        ids = tuple(cast("Sequence[int]", values))
        if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
            return ids
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
            raise fields.wrong(
                name, f"{shown(value)} is no token id, they are from 0 to {vocab_size - 1}"
            )
    raise AssertionError("one of them is none")


def _prompts(fields: Fields, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    value = fields.raw("prompt")
    if value is None:
        raise fields.wrong("prompt", "is required")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise fields.wrong("prompt", f"must be a string or a non-empty list, not {shown(value)}")
    if isinstance(value[0], int):
        return (checked_ids(fields, "prompt", value, vocab_size),)
    return _several_prompts(fields, value, vocab_size)


def _several_prompts(
    fields: Fields, values: list[object], vocab_size: int
) -> tuple[str | tuple[int, ...], ...]:
    if len(values) > MAX_PROMPTS:
        raise fields.wrong("prompt", f"has {len(values)} prompts, the limit is {MAX_PROMPTS}")
    is_text = isinstance(values[0], str)
    prompts: list[str | tuple[int, ...]] = []
    for index, value in enumerate(values):
        if is_text and isinstance(value, str):
            prompts.append(value)
        elif not is_text and isinstance(value, list) and value:
            prompts.append(checked_ids(fields, "prompt", value, vocab_size))
        else:
            kind = "a string" if is_text else "a list of token ids"
            raise fields.wrong("prompt", f"item {index} is {shown(value)}, not {kind}")
    return tuple(prompts)
