"""Bodies made into jobs: parsed, checked, rendered, tokenised. Synchronous; long ones run off the loop."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.cache.tenants import salt_of
from prfaas.clock import Clock
from prfaas.errors import BadRequest
from prfaas.server.answering import Job
from prfaas.server.body import parse_object
from prfaas.server.node import ServingNode
from prfaas.server.openai.answers import AnswerHead, Endpoint
from prfaas.server.openai.fields import shown
from prfaas.server.openai.requests import (
    ModelLimits,
    Settings,
    parse_chat,
    parse_completion,
    parse_model,
)
from prfaas.transport.handshake import Identity
from prfaas.types import Request


class LongJob(Exception):
    """Text so long, or that a template may make so much of, that no event loop can wait for its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Arrival:
    """What the door gives a request."""

    request_id: str
    arrival_s: float
    api_key: bytes | None
    """None if none is asked for."""


class JobMaker:
    """Makes jobs for one node. Safe to use from several threads.

    Args:
        node: whose tokenizer, template and context count.
        model_name: what clients call the model; any other is 404.
        draw_seed: gives requests without a seed one.
        wall: for the `created` fields.
    """

    def __init__(
        self,
        *,
        node: ServingNode,
        model_name: str,
        draw_seed: Callable[[], int],
        wall: Clock,
    ) -> None:
        self._node = node
        self._model_name = model_name
        self._draw_seed = draw_seed
        self._wall = wall
        self._limits = ModelLimits(
            vocab_size=node.tokenizer.vocab_size, eos_ids=node.tokenizer.eos_ids
        )

    def chat(self, body: bytes, arrival: Arrival, max_chars: int | None = None) -> Job:
        """Return the job of a /v1/chat/completions body, or raise BadRequest.

        With `max_chars`, LongJob for a rendered text that is longer, and for tools and calls of them: a
        template may indent them, and a short body's are as long as one likes.
        """
        parsed_body = self._parse_body(body)
        parsed = parse_chat(parsed_body, self._limits, self._draw_seed)
        template = self._node.chat_template
        if max_chars is not None and (
            parsed.tools or any("tool_calls" in message for message in parsed.messages)
        ):
            raise LongJob
        text = template.render(parsed.messages, tools=parsed.tools)
        if max_chars is not None and len(text) > max_chars:
            raise LongJob
        tokens = self._node.tokenizer.encode(text, add_bos=not template.adds_bos)
        return self._job(
            "chat",
            arrival,
            parsed.settings,
            prompts=[tuple(tokens)],
            echoes=("",),
            template_stops=template.stop_strings,
        )

    def completion(self, body: bytes, arrival: Arrival, max_chars: int | None = None) -> Job:
        """Return the job of a /v1/completions body, or raise BadRequest.

        With `max_chars`, LongJob for prompts that are longer together.
        """
        parsed_body = self._parse_body(body)
        parsed = parse_completion(parsed_body, self._limits, self._draw_seed)
        if max_chars is not None and sum(map(len, parsed.prompts)) > max_chars:
            raise LongJob
        tokenizer = self._node.tokenizer
        prompts = [
            tuple(tokenizer.encode(prompt, add_bos=True)) if isinstance(prompt, str) else prompt
            for prompt in parsed.prompts
        ]
        echoes = [
            ""
            if not parsed.is_echo
            else prompt
            if isinstance(prompt, str)
            else tokenizer.decode(prompt)
            for prompt in parsed.prompts
        ]
        if not all(prompts):
            raise BadRequest("prompt: has no tokens", param="prompt")
        return self._job(
            "completions",
            arrival,
            parsed.settings,
            prompts=prompts,
            echoes=tuple(echoes),
            template_stops=(),
        )

    def _parse_body(self, body: bytes) -> dict[str, object]:
        parsed = parse_object(body)
        check_model(parse_model(parsed), self._model_name)
        return parsed

    def _job(
        self,
        endpoint: Endpoint,
        arrival: Arrival,
        settings: Settings,
        *,
        prompts: list[tuple[int, ...]],
        echoes: tuple[str, ...],
        template_stops: tuple[str, ...],
    ) -> Job:
        prefix = "chatcmpl" if endpoint == "chat" else "cmpl"
        return Job(
            head=AnswerHead(
                endpoint=endpoint,
                answer_id=f"{prefix}-{arrival.request_id}",
                created_s=int(self._wall()),
                model=self._model_name,
                system_fingerprint=system_fingerprint(self._node.identity),
            ),
            requests=tuple(
                Request(
                    request_id=part_id(arrival.request_id, index, len(prompts)),
                    prompt_tokens=tokens,
                    sampling=settings.sampling_within(
                        prompt_tokens=len(tokens),
                        max_context_tokens=self._node.max_context_tokens,
                        prompt_param="messages" if endpoint == "chat" else "prompt",
                    ),
                    num_choices=settings.num_choices,
                    cache_salt=salt_of(arrival.api_key, settings.cache_salt),
                    arrival_s=arrival.arrival_s,
                )
                for index, tokens in enumerate(prompts)
            ),
            echoes=echoes,
            stops=tuple(dict.fromkeys((*settings.stops, *template_stops))),
            is_stream=settings.is_stream,
            includes_usage=settings.includes_usage,
            has_logprobs=settings.num_logprobs is not None,
        )


def part_id(request_id: str, index: int, num_prompts: int) -> str:
    """Return the engine's id of one prompt of a request."""
    return request_id if num_prompts == 1 else f"{request_id}-{index}"


def check_model(name: str, served_name: str) -> None:
    """Raise BadRequest, status 404, unless `name` is the served one."""
    if name != served_name:
        raise BadRequest(
            f"the model {shown(name)} does not exist here, this node serves {shown(served_name)}",
            param="model",
            code="model_not_found",
            status=404,
        )


@functools.lru_cache(maxsize=8)
def system_fingerprint(identity: Identity) -> str:
    """Return a short name for weights and numerics: equal names, equal seeded answers."""
    text = f"{identity.model_fingerprint}\n{identity.numerics_fingerprint}"
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
