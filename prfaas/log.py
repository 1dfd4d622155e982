"""structlog events on standard error: `noun.verb` with fields in named units, never prompt text."""

import logging
import sys
from contextlib import suppress
from typing import Literal, TextIO, cast

import structlog

LogFormat = Literal["console", "json"]
Logger = structlog.typing.FilteringBoundLogger

_TRACEBACKS_WITHOUT_LOCALS = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)  # they hold prompts and keys
)


class _StandardError:
    """Standard error as it is when a line is written. A line that nobody takes is lost.

    A closed terminal or a log collector that died must cost lines, never a thread or an answer.
    """

    def write(self, text: str) -> None:
        if sys.stderr is not None:
            with suppress(OSError, ValueError):
                sys.stderr.write(text)

    def flush(self) -> None:
        if sys.stderr is not None:
            with suppress(OSError, ValueError):
                sys.stderr.flush()


def configure_logging(*, level: str = "info", log_format: LogFormat = "console") -> None:
    """Send all events of `level` and above to standard error in one format.

    Control characters in values are escaped by both renderers, so that a client's bytes cannot
    forge a line.
    """
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"])
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _TRACEBACKS_WITHOUT_LOCALS
            if log_format == "json"
            else structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=cast("TextIO", _StandardError())),
        cache_logger_on_first_use=False,
    )


def get_logger() -> Logger:
    """Return the logger; bind request_id where a request enters."""
    return cast("Logger", structlog.get_logger())
