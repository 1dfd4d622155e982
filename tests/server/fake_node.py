"""A node of the pd role that answers from a script, token by token, under the test's control."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Self

from aiohttp import web

from prfaas.config.options import Role  # noqa: TC001
from prfaas.server.node import NodeLoad
from prfaas.text.chat_template import ChatTemplate
from prfaas.text.tokenizer import Tokenizer
from prfaas.transport.handshake import Identity
from prfaas.types import (
    FinishReason,
    Request,
    RequestRecord,
    RouteName,
    TokenEvent,
    TokenLogprobs,
)
from tests.tiny_configs import BOS_ID, EOS_ID
from tests.tiny_tokenizer import tiny_tokenizer

TINY_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}<assistant>"
)


def tiny_text_tokenizer() -> Tokenizer:
    return Tokenizer(
        tiny_tokenizer(),
        spelling="byte-level",
        fingerprint="tiny",
        bos_id=BOS_ID,
        eos_ids=(EOS_ID,),
        starts_with_bos=True,
    )


TOKENIZER = tiny_text_tokenizer()


def token_ids(text: str) -> list[int]:
    """The tokens of a text, as a model would draw them."""
    return TOKENIZER.encode(text, add_bos=False)


_ID_OF_BYTE = {
    TOKENIZER.token_bytes(token_id): token_id for token_id in reversed(range(TOKENIZER.vocab_size))
}


def byte_ids(text: str | bytes) -> list[int]:
    """One token for each byte of a text's UTF-8."""
    data = text.encode() if isinstance(text, str) else text
    return [_ID_OF_BYTE[bytes([byte])] for byte in data]


class FakeGeneration:
    def __init__(self, node: "FakeNode", request: Request, drawn: list[list[int]]) -> None:
        self._node = node
        self._request = request
        self._drawn = drawn
        self._stopped: set[int] = set()
        self._step = 0
        self._ready: deque[TokenEvent] = deque()
        self.record = RequestRecord(
            request_id=request.request_id,
            prompt_tokens=len(request.prompt_tokens),
            route="remote",
            reason="above_threshold",
            peer="127.0.0.1:8100",
            tokens_reused=1,
            tokens_local=0,
            tokens_remote=len(request.prompt_tokens) - 1,
            bytes_received=1234,
            predicted_ttft_s=0.5,
            ttft_s=0.25,
        )
        self.first_logits: bytes | None = None

    def stop_choice(self, choice_index: int) -> None:
        self._stopped.add(choice_index)
        self._node.stopped_choices.append((self._request.request_id, choice_index))

    @property
    def has_next(self) -> bool:
        return bool(self._ready) or self._step >= max(map(len, self._drawn))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._ready:
            if self._step >= max(map(len, self._drawn)):
                raise StopAsyncIteration
            await self._draw()
        return self._ready.popleft()

    async def _draw(self) -> None:
        """Put the events of one step into what is ready; a cancelled wait changes nothing."""
        node, step = self._node, self._step
        if node.fail_before is not None:
            raise node.fail_before
        if node.hold_at == step:
            node.is_holding.set()
            await node.release.wait()
        if node.fail_at is not None and node.fail_at[0] == step:
            raise node.fail_at[1]
        await asyncio.sleep(0)
        self._step += 1
        for choice in range(self._request.num_choices):
            if choice not in self._stopped and step < len(self._drawn[choice]):
                self._ready.append(self._event(choice, step))
        if len(self._stopped) == self._request.num_choices:
            self._step = max(map(len, self._drawn))

    def _event(self, choice: int, step: int) -> TokenEvent:
        sampling = self._request.sampling
        token_id = self._drawn[choice][step]
        is_last = step + 1 == len(self._drawn[choice])
        reason: FinishReason | None = None
        if is_last:
            reason = "stop" if token_id in sampling.stop_token_ids else "length"
        logprobs = None
        if sampling.num_logprobs is not None:
            candidates = [(token_id, -0.1), (EOS_ID, -3.0), (7, float("-inf")), (8, float("nan"))]
            logprobs = TokenLogprobs(logprob=-0.1, top=tuple(candidates[: sampling.num_logprobs]))
        self._node.num_drawn += 1
        return TokenEvent(
            request_id=self._request.request_id,
            choice_index=choice,
            token_id=token_id,
            logprobs=logprobs,
            finish_reason=reason,
        )


class FakeNode:
    """Draws `script(request)[choice]`, cut at max_tokens or a stop token, and then EOS."""

    def __init__(
        self, script: Callable[[Request], Sequence[Sequence[int]]] | str = "Hello, world!"
    ) -> None:
        if isinstance(script, str):
            tokens = token_ids(script)
            self.script: Callable[[Request], Sequence[Sequence[int]]] = lambda request: (
                [tokens] * request.num_choices
            )
        else:
            self.script = script
        self.role: Role = "pd"
        self.tokenizer = TOKENIZER
        self.chat_template = ChatTemplate(TINY_TEMPLATE)
        self.max_context_tokens = 2048
        self.ready: tuple[bool, str] = (True, "")
        self.identity = Identity(
            model_fingerprint="m",
            tokenizer_fingerprint="t",
            template_fingerprint="c",
            kv_dtype="float32",
            block_tokens=64,
            layout="l",
            numerics_fingerprint="n",
        )
        self.requests: list[Request] = []
        self.stopped_choices: list[tuple[str, int]] = []
        self.num_running = 0
        self.num_drawn = 0
        self.num_aborted = 0
        self.hold_at: int | None = None
        """The step before which every generation waits for `release`."""
        self.is_holding = asyncio.Event()
        self.release = asyncio.Event()
        self.fail_before: Exception | None = None
        self.fail_at: tuple[int, Exception] | None = None
        self.is_started = False
        self.is_draining = False
        self.is_closed = False

    @property
    def is_ready(self) -> tuple[bool, str]:
        return self.ready

    def load(self) -> NodeLoad:
        return NodeLoad(
            num_running=self.num_running,
            pages={"free": 3, "cached": 2},
            peers_usable={"127.0.0.1:8100": True},
            peers_by_http={"127.0.0.1:8100": False},
        )

    def routes(self) -> list[web.RouteDef]:
        return []

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        self.is_started = True

    def drain(self) -> None:
        self.is_draining = True

    async def close(self) -> None:
        self.is_closed = True

    @asynccontextmanager
    async def generate(
        self,
        request: Request,
        *,
        force_route: RouteName | None = None,
        return_logits: bool = False,
    ) -> AsyncIterator[FakeGeneration]:
        self.requests.append(request)
        self.num_running += 1
        try:
            yield FakeGeneration(
                self, request, [self._cut(request, t) for t in self.script(request)]
            )
        except BaseException:
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1

    def _cut(self, request: Request, tokens: Sequence[int]) -> list[int]:
        drawn: list[int] = []
        for token_id in [*tokens, EOS_ID]:
            drawn.append(token_id)
            if token_id in request.sampling.stop_token_ids:
                break
        return drawn[: request.sampling.max_tokens]
