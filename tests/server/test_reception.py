"""What a transfer's frames tell of how far the peer is."""

from typing import TYPE_CHECKING, cast

from prfaas.server.generation import RunningGeneration
from prfaas.server.pull import Pull
from prfaas.server.reception import Reception, RemoteAttempt
from prfaas.transport.messages import (
    FirstTokens,
    PrefillTimes,
    TransferAccepted,
    encode_first_tokens,
)
from prfaas.transport.wire import Frame, FrameHeader, FrameType, encode_progress
from prfaas.types import Request, SamplingParams, TokenEvent
from tests.server.fleet import make_cache, prompt
from tests.server.scripted_engine import DENSE

if TYPE_CHECKING:
    from prfaas.server.peer import Peer

NUM_TOKENS = 100
TIMES = PrefillTimes(begun_s=0.5, computed_s=1.5, num_tokens=36, num_engine_tokens=80)
REQUEST = Request(
    request_id="a",
    prompt_tokens=prompt(NUM_TOKENS),
    sampling=SamplingParams(max_tokens=4, seed=0),
)


def reception() -> Reception:
    cache = make_cache(DENSE)
    table = cache.lookup(cache.block_keys(REQUEST.prompt_tokens, b""), NUM_TOKENS)
    assert table.try_reserve(NUM_TOKENS)
    return Reception(
        Pull(layout=cache.layout, table=table, num_tokens=NUM_TOKENS, have_tokens=0),
        RemoteAttempt(
            peer=cast("Peer", None),
            request=REQUEST,
            table=table,
            salt=b"",
            is_exact=True,
            accept_approximate=False,
            want_logits=False,
            local_estimate_s=None,
        ),
        RunningGeneration(REQUEST, clock=lambda: 0.0),
        vocab_size=1000,
        clock=lambda: 42.0,
    )


def take(receiver: Reception, kind: FrameType, payload: bytes) -> tuple[int, int]:
    receiver.take(Frame(header=FrameHeader(type=kind, length=len(payload)), payload=payload))
    return receiver.tokens_done, receiver.tokens_ahead


def test_first_tokens_say_that_the_whole_prompt_is_computed():
    receiver = reception()
    assert take(receiver, FrameType.PROGRESS, encode_progress(0, 30)) == (0, 30)
    assert take(receiver, FrameType.PROGRESS, encode_progress(64, 0)) == (64, 0)
    event = TokenEvent(request_id="a", choice_index=0, token_id=7)
    first = encode_first_tokens(FirstTokens(events=(event,), times=TIMES))
    assert take(receiver, FrameType.FIRST_TOKENS, first) == (NUM_TOKENS, 0)
    # One that was overtaken on another stream takes nothing back.
    assert take(receiver, FrameType.PROGRESS, encode_progress(64, 0)) == (NUM_TOKENS, 0)


def test_the_peer_s_word_on_its_prefill_is_kept_beside_the_moment_it_took_the_prompt():
    receiver = reception()
    receiver.accepted(TransferAccepted(hit_tokens=64))
    event = TokenEvent(request_id="a", choice_index=0, token_id=7)
    take(
        receiver,
        FrameType.FIRST_TOKENS,
        encode_first_tokens(FirstTokens(events=(event,), times=TIMES)),
    )
    attempt = receiver._attempt
    assert (attempt.accepted_s, attempt.times, attempt.peer_hit_tokens) == (42.0, TIMES, 64)
