"""Every error as an HTTP answer in OpenAI's shape; the one place where they are mapped."""

import math
from http import HTTPStatus

from aiohttp import web

from prfaas.errors import BadRequest, EngineError, Overloaded, TransferError
from prfaas.server.openai.answers import Json, error_body, to_json


def error_status(error: Exception) -> int:
    """Return the HTTP status that `error` stands for."""
    match error:
        case BadRequest(status=status):
            return status
        case Overloaded():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR


def failure_reason(error: Exception) -> str:
    """Return the label under which the failure counts."""
    match error:
        case BadRequest():
            return "bad_request"
        case Overloaded():
            return "overloaded"
        case EngineError() | TransferError():
            return "engine_error"
        case _:
            return "internal"


def error_event(error: Exception) -> Json:
    """Return the body that tells a client of `error`; what is our own fault is not described."""
    status = error_status(error)
    match error:
        case BadRequest(param=param, code=code):
            return error_body(str(error), status=status, param=param, code=code)
        case Overloaded():
            return error_body(str(error), status=status, code="overloaded")
        case EngineError():
            return error_body(str(error), status=status, code="engine_error")
        case _:
            return error_body("internal error", status=status, code="internal_error")


def error_response(error: Exception) -> web.Response:
    """Return the whole answer to a request that failed with `error`."""
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return json_error(error_event(error), status=error_status(error), headers=headers)


def json_error(body: Json, *, status: int, headers: dict[str, str] | None = None) -> web.Response:
    """Return an error body as an answer."""
    return web.Response(
        body=to_json(body), status=status, content_type="application/json", headers=headers
    )


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that began a task group's end: the group cancels the rest."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
