"""Values that several test files of the transport share."""

from dataclasses import replace

from prfaas.transport.handshake import Identity
from prfaas.transport.messages import TransferRequest
from prfaas.transport.wire import FrameType, encode_frame, encode_progress
from prfaas.types import Request, SamplingParams

CAPABILITY = "c0ffee42" * 4

IDENTITY = Identity(
    model_fingerprint="model",
    tokenizer_fingerprint="tokenizer",
    template_fingerprint="template",
    kv_dtype="float32",
    block_tokens=16,
    layout="full:0,1",
    numerics_fingerprint="cpu",
)

ASKED = TransferRequest(
    transfer_id="0123456789abcdef" * 2,
    identity=IDENTITY,
    accept_approximate=False,
    request=Request(
        request_id="request",
        prompt_tokens=tuple(range(100)),
        sampling=SamplingParams(max_tokens=8, seed=3),
    ),
    have_tokens=32,
    capability=CAPABILITY,
    credit_bytes=1 << 40,
)


def asked(**changes: object) -> TransferRequest:
    return replace(ASKED, **changes)  # type: ignore[arg-type]


def progress_frame(tokens_done: int, tokens_ahead: int) -> bytes:
    return encode_frame(FrameType.PROGRESS, encode_progress(tokens_done, tokens_ahead))
