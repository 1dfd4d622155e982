"""Every exception that prfaas raises on purpose, split by who must act.

PrfaasError
├── ConfigError            the operator: a setting, a file, a model that cannot be used
├── BadRequest             the client: 4xx, names the value and the limit
├── Overloaded             nobody now, the client later: 503 with Retry-After
├── EngineError            the engine could not finish a request: 500
├── StoreError             the cache: counts as a miss
└── TransferError          retry or fall back to a local prefill
    ├── ProtocolError      bytes that are not frames, or frames out of order
    ├── TransferTimeout    no verified byte within the deadline
    ├── PromptRefused      the peer cannot take this prompt; it can take others
    ├── IncompatiblePeer   the handshake found two different values
    └── UntrustedPeer      one of the two ends did not prove that it has the cluster key
"""


class PrfaasError(Exception):
    """Any error that prfaas raises on purpose."""


class ConfigError(PrfaasError):
    """A setting, file or model that the operator must change."""


class BadRequest(PrfaasError):
    """A request that its client must change.

    Attributes:
        param: the field at fault, or None.
        code: OpenAI's machine-readable code, or None.
        status: the HTTP status, 4xx.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class Overloaded(PrfaasError):
    """No room now; `retry_after_s` says when to try again."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(PrfaasError):
    """The engine could not finish a request."""


class StoreError(PrfaasError):
    """A cached object that cannot be read or written: a miss."""


class TransferError(PrfaasError):
    """A KV transfer that did not complete; the rest is prefilled locally."""


class ProtocolError(TransferError):
    """Bytes that are not valid frames, or frames that break the order."""


class TransferTimeout(TransferError):
    """A peer that sent nothing verified within the deadline."""


class PromptRefused(TransferError):
    """A peer that is well but has no use for this prompt: too long for its limits."""


class IncompatiblePeer(TransferError):
    """A peer whose model, layout or numerics differ; the message names both values."""


class UntrustedPeer(TransferError):
    """A peer that did not prove that it has our cluster key, or that does not believe that we have."""
