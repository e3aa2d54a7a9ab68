"""Who may ask, how much, and how often."""

import asyncio
import hmac
import ipaddress
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

from paceline.serve.errors import ApiError


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Bytes of one body, seconds it may take to arrive, choices in flight over all clients, requests per minute of one
    client (None: no bound), new tokens per choice, sessions kept."""

    max_body_bytes: int = 4 * 2**20
    body_timeout_s: float = 30.0
    max_in_flight: int = 512
    requests_per_minute: int | None = None
    max_new_tokens: int = 4096
    max_sessions: int = 10_000


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class RateLimiter:
    """`per_minute` requests for every client, refilled evenly, with bursts of at most a tenth of them."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, client: str) -> None:
        """Counts one request. Raises `ApiError` 429, with the seconds after which the next one is served."""
        if self._per_minute is None:
            return
        now, rate = self._clock(), self._per_minute / 60.0
        burst = max(1.0, self._per_minute / 10.0)
        left, since = self._left.get(client, (burst, now))
        left = min(burst, left + (now - since) * rate)
        if left < 1.0:
            self._left[client] = (left, now)
            wait = math.ceil((1.0 - left) / rate)
            message = f"Rate limit of {self._per_minute} requests per minute reached; try again in {wait} s."
            raise ApiError(429, message, None, "rate_limit_exceeded", "rate_limit_error", wait)
        self._left[client] = (left - 1.0, now)
        if len(self._left) > 10_000:  # clients whose allowance is full again need no entry
            self._left = {c: (n, t) for c, (n, t) in self._left.items() if n + (now - t) * rate < burst}


class Guard:
    """Checks every request before anything else looks at it. `api_key` None: loopback clients only."""

    def __init__(self, api_key: str | None, limits: ServeLimits) -> None:
        self._api_key, self._limits = api_key, limits
        self._rate = RateLimiter(limits.requests_per_minute)

    def admit(self, request: Request) -> None:
        """Raises `ApiError`: 401 without the key, 403 for a name that is not this machine's, 429 too often."""
        if self._api_key is not None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._api_key.encode()):
                message = "Incorrect API key provided, or none: send it as a bearer token."
                raise ApiError(401, message, None, "invalid_api_key", "authentication_error")
        elif not is_loopback(request.url.hostname or ""):
            # a web page that points its own name at 127.0.0.1 must not reach a server without a key
            message = f"Host {request.url.hostname!r} is not this machine; a server without a key answers localhost."
            raise ApiError(403, message, None, "forbidden_host", "permission_error")
        self._rate.take(request.client.host if request.client else "")

    async def json_body(self, request: Request) -> Any:
        """The body, read up to the limit. Raises `ApiError`: 413 too large, 408 too slow, 415 and 400 not JSON."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "The body must be application/json.", None, "unsupported_media_type")
        limit = self._limits.max_body_bytes
        too_large = ApiError(413, f"The body is larger than {limit} bytes.", None, "request_too_large")
        stated = request.headers.get("content-length", "0")
        if stated.isdigit() and int(stated) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise too_large
        except TimeoutError as error:
            raise ApiError(408, "The body did not arrive in time.", None, "request_timeout") from error
        except ClientDisconnect as error:
            raise ApiError(499, "The client left.", None, "client_left") from error
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"The body is not JSON: {error}.", None, "invalid_json") from error
