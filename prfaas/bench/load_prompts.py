"""Requests with prompts of made-up token ids: as long as asked for, alike where a trace says so.

All ids have two digits, so that a prompt's text is cut and joined by length alone: a prompt of 128K
tokens takes a millisecond, not the pause that it is to be sent after.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from prfaas.bench.load import Planned
from prfaas.config.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest

FIRST_ID, NUM_IDS = 32, 64
"""Tokenizers have these ids, and they are rarely special."""
ID_CHARS = 3
"""Two digits and a comma."""
_TENS = bytes(48 + (FIRST_ID + byte % NUM_IDS) // 10 for byte in range(256))
_ONES = bytes(48 + (FIRST_ID + byte % NUM_IDS) % 10 for byte in range(256))


@dataclass(frozen=True, slots=True)
class LoadPrompts:
    """The prompts of one load: equal keys give equal prompts, others nothing in common.

    A trace's block stands for the same tokens wherever it comes, so that a prefix cache hits as it
    would have when the trace was taken.
    """

    key: str

    def text(self, request: TraceRequest, index: int) -> bytes:
        """Return the ids of the `index`-th request of the load, with commas between them."""
        num_tokens, size = request.input_tokens, MOONCAKE_BLOCK_TOKENS
        parts = [
            self._ids(f"block {block}", min(size, num_tokens - place * size))
            for place, block in enumerate(request.block_ids)
            if place * size < num_tokens
        ]
        rest = num_tokens - len(parts) * size
        if rest > 0:
            parts.append(self._ids(f"request {index}", rest))
        return b"".join(parts)[:-1]

    def _ids(self, name: str, num_tokens: int) -> bytes:
        """Return `num_tokens` ids, a comma behind each; fewer are the beginning of more."""
        draws = hashlib.shake_128(f"{self.key}\n{name}".encode()).digest(num_tokens)
        text = bytearray(b",") * (ID_CHARS * num_tokens)
        text[0::ID_CHARS] = draws.translate(_TENS)
        text[1::ID_CHARS] = draws.translate(_ONES)
        return bytes(text)


def request_body(model: str, prompt: bytes, max_tokens: int) -> bytes:
    """Return a body that asks for a streamed answer of exactly so many tokens."""
    head = json.dumps(
        {
            "model": model,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    return head[:-1] + b', "prompt": [' + prompt + b"]}"


def planned_requests(
    requests: Sequence[TraceRequest], prompts: LoadPrompts, model: str
) -> list[Planned]:
    """Return what is to be sent: answers of at least one token."""

    def body(request: TraceRequest, index: int) -> bytes:
        return request_body(model, prompts.text(request, index), max(1, request.output_tokens))

    return [
        Planned(
            due_s=request.arrival_s,
            prompt_tokens=request.input_tokens,
            body=partial(body, request, index),
        )
        for index, request in enumerate(requests)
    ]
