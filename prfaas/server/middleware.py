"""What happens to every request: an id, errors in one shape, the key, CORS, the count."""

import re
import secrets
from collections.abc import Awaitable, Callable, Collection

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from prfaas.config.options import HttpOptions
from prfaas.errors import BadRequest, PrfaasError
from prfaas.log import get_logger
from prfaas.server.api_keys import ApiKeys
from prfaas.server.failures import error_event, error_response, json_error
from prfaas.server.metrics import OTHER, Metrics
from prfaas.server.openai.answers import error_body
from prfaas.server.openai.fields import shown

REQUEST_ID = web.RequestKey("request_id", str)
"""Key of a request's own id in `web.Request`."""
API_KEY = web.RequestKey("api_key", bytes)
"""Key of the API key that the client showed, in a `web.Request`; absent if none is asked for."""
TENANT_PREFIX = "/v1/"
"""What a tenant's key opens. Figures and stories of all tenants are the operator's."""
OPERATOR_PATHS = frozenset({"/v1/cluster"})
"""Under the prefix, and yet the operator's."""
PUBLIC_PATHS = frozenset({"/health", "/ready"})
"""Served without a key: an orchestrator's probes."""
PREFLIGHT_MAX_AGE_S = 600
EXPOSED_HEADERS = (
    "X-Request-Id, X-Prfaas-Node, X-Prfaas-Route, X-Prfaas-Reason, X-Prfaas-Tokens-Reused,"
    " X-Prfaas-Tokens-Local, X-Prfaas-Tokens-Remote, X-Prfaas-Bytes-Received, Retry-After"
)

_HEADER_LIST = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1000}")

log = get_logger()


def draw_request_id() -> str:
    """Return a fresh request id."""
    return secrets.token_hex(12)


def answering_errors(draw_id: Callable[[], str]) -> Middleware:
    """Return the outermost middleware: an id for the request, and OpenAI's shape for its errors."""

    @web.middleware
    async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = draw_id()
        with structlog.contextvars.bound_contextvars(request_id=request[REQUEST_ID]):
            try:
                return await handler(request)
            except web.HTTPException as error:
                return _http_error(request, error)
            except PrfaasError as error:
                return error_response(error)
            except ConnectionError:
                raise
            except Exception as error:
                log.exception("request.crashed")
                return json_error(error_event(error), status=500)

    return answer_errors


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    """Return aiohttp's own 404, 405, 413... with OpenAI's body and the headers that it needs."""
    path = shown(request.path)
    match error.status:
        case 404:
            message = f"there is no {shown(request.method)} {path}"
        case 405:
            message = f"{path} does not take {shown(request.method)}"
        case _:
            message = error.reason
    headers = {name: error.headers[name] for name in ("Allow", "Location") if name in error.headers}
    return json_error(
        error_body(message, status=error.status), status=error.status, headers=headers
    )


def counting(metrics: Metrics) -> Middleware:
    """Return the middleware that counts answers by route template."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        resource = request.match_info.route.resource
        metrics.record_http(
            route_template=OTHER if resource is None else resource.canonical,
            method=request.method,
            status=response.status,
        )
        return response

    return count


def checking_key(keys: ApiKeys, own_auth_prefixes: Collection[str]) -> Middleware:
    """Return the middleware that lets in only bearers of one of `keys`, tenants to the API alone.

    The key is taken from `Authorization: Bearer KEY` (the scheme in any case, any spaces before the
    key) and from `X-Api-Key: KEY`, never from the query. Paths under `own_auth_prefixes`
    authenticate their clients themselves.
    """

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in PUBLIC_PATHS or request.path.startswith(tuple(own_auth_prefixes)):
            return await handler(request)
        key = keys.match(_shown_key(request))
        if key is None:
            response = error_response(
                BadRequest(
                    "the API key is missing or wrong: send Authorization: Bearer KEY",
                    code="invalid_api_key",
                    status=401,
                )
            )
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        is_tenants = request.path.startswith(TENANT_PREFIX) and request.path not in OPERATOR_PATHS
        if not is_tenants and not keys.is_operator(key):
            return error_response(
                BadRequest(
                    "this API key opens /v1 only; the rest takes the operator's",
                    code="insufficient_permissions",
                    status=403,
                )
            )
        request[API_KEY] = key
        return await handler(request)

    return check_key


def _shown_key(request: web.Request) -> bytes:
    """Return the key that the client shows, as bytes: header text may hold surrogates."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = request.headers.get("X-Api-Key", "")
    return key.strip().encode("utf-8", "surrogateescape")


def answering_preflight(options: HttpOptions) -> Middleware:
    """Return the middleware that answers CORS preflights, which never carry a key."""

    @web.middleware
    async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_preflight = (
            request.method == "OPTIONS"
            and "Origin" in request.headers
            and "Access-Control-Request-Method" in request.headers
        )
        if not is_preflight or options.cors_allow_origin is None:
            return await handler(request)
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        allowed = "authorization, content-type, x-api-key"
        if _HEADER_LIST.fullmatch(wanted):
            allowed = f"{allowed}, {wanted}"
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
                "Access-Control-Allow-Headers": allowed,
                "Access-Control-Max-Age": str(PREFLIGHT_MAX_AGE_S),
            },
        )

    return answer_preflight


def add_headers(
    options: HttpOptions,
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Return the signal that puts the request's id, and CORS if wanted, on every answer."""

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "prfaas"  # aiohttp would tell its version
        request_id = request.get(REQUEST_ID)
        if request_id is not None:
            response.headers["X-Request-Id"] = request_id
        if options.cors_allow_origin is not None and "Origin" in request.headers:
            response.headers["Access-Control-Allow-Origin"] = options.cors_allow_origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS
            response.headers["Vary"] = "Origin"

    return add
