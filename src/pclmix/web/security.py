"""Who may talk to the server, and what a browser may do with its answers.

A page of another site can make a browser send requests here. It cannot read the answers, but a request alone could
draw or train; and by pointing a name of its own at 127.0.0.1 (DNS rebinding) it could read, too. So: the Host must be
one of ours, a request from another site is refused by Origin and Sec-Fetch-Site, and everything that changes
something carries a header that no form can send. On an address others can reach, every request needs the token.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL = ("127.0.0.1", "localhost", "::1")
COOKIE, HEADER = "pclmix_token", "x-pclmix"
_SAFE = ("GET", "HEAD")
UPLOAD = "/api/import"  #: the one path whose body may be large: it is counted there while it streams
_BODY = 64 << 20
#: The viewer compiles no code and loads nothing from elsewhere; its font is a data: address, its workers are blobs.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' data: blob:; worker-src 'self' blob:; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def is_local(host: str) -> bool:
    return host in LOCAL


def new_token() -> str:
    return secrets.token_urlsafe(24)


@dataclass(frozen=True)
class Rules:
    """`token` is None on this computer's own address. `names` are the hosts a request may name; empty: any."""

    token: str | None = None
    names: frozenset[str] = field(default_factory=lambda: frozenset(LOCAL))

    @classmethod
    def of(cls, host: str) -> Rules:
        """The rules for an address to listen on: any but this computer's own needs a token."""
        if is_local(host):
            return cls()
        everywhere = host in ("0.0.0.0", "::", "")
        return cls(new_token(), frozenset() if everywhere else frozenset({host, *LOCAL}))


class Guard:
    """ASGI middleware that lets a request through only if the rules allow it."""

    def __init__(self, app: App, rules: Rules) -> None:
        self.app, self.rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websockets here
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        if scope["method"] not in _SAFE and scope["path"] != UPLOAD:
            length = headers.get("content-length", "")
            if not length.isdigit() or int(length) > _BODY:
                await _answer(send, 413, f"a request needs a content-length of at most {_BODY >> 20} MiB")
                return
        reason = self._refusal(scope["method"], scope["path"], headers)
        if reason:
            await _answer(send, 403, reason)
        elif self.rules.token is not None and not self._has_token(headers):
            await self._ask_for_token(scope, send)
        else:
            await self.app(scope, receive, _with_headers(send, scope["path"]))

    def _refusal(self, method: str, path: str, headers: dict[str, str]) -> str:
        host = headers.get("host", "")
        if self.rules.names and _name(host) not in self.rules.names:
            return "this address is not one the workbench was started for"
        site = headers.get("sec-fetch-site", "none")
        navigation = method == "GET" and headers.get("sec-fetch-mode") == "navigate" and not path.startswith("/api")
        if site not in ("same-origin", "none") and not navigation:
            return "requests from other sites are refused"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return "requests from other sites are refused"
        if method not in _SAFE and headers.get(HEADER) != "1":
            return f"a request that changes something needs the header {HEADER}: 1"
        return ""

    def _has_token(self, headers: dict[str, str]) -> bool:
        given = [headers.get("authorization", "").removeprefix("Bearer ")]
        cookies = SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except CookieError:
            cookies.clear()
        if COOKIE in cookies:
            given.append(cookies[COOKIE].value)
        return any(self._is_token(value) for value in given)

    def _is_token(self, value: str) -> bool:
        assert self.rules.token is not None
        return secrets.compare_digest(value.encode(), self.rules.token.encode())

    async def _ask_for_token(self, scope: Scope, send: Send) -> None:
        """The address printed at start has the token in it: it becomes a cookie and leaves the address bar."""
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        given = [value for key, value in query if key == "token"]
        if scope["method"] == "GET" and scope["path"] == "/" and given and self._is_token(given[0]):
            rest = urlencode([(key, value) for key, value in query if key != "token"])
            cookie = f"{COOKIE}={self.rules.token}; Path=/; HttpOnly; SameSite=Strict"
            # Not a redirect: a strict cookie is not sent along one that began on another site.
            page = f'<!doctype html><meta http-equiv="refresh" content="0;url=/{"?" + rest if rest else ""}">'
            headers = [(b"set-cookie", cookie.encode()), (b"content-type", b"text/html; charset=utf-8")]
            await _answer(send, 200, page, headers)
            return
        await _answer(send, 401, "open the address that `pclmix serve` printed: it carries the token")


def _name(host: str) -> str:
    """The name in a Host header, without its port or an IPv6 address's brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def _with_headers(send: Send, path: str) -> Send:
    async def wrapped(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            present = {key.lower() for key, _ in message["headers"]}
            extra = dict(_HEADERS)
            extra["cache-control"] = "no-store" if path.startswith("/api") else "no-cache"
            more = [(k.encode(), v.encode()) for k, v in extra.items() if k.encode() not in present]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return wrapped


async def _answer(send: Send, status: int, text: str, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    body = text.encode()
    given = headers or [(b"content-type", b"text/plain; charset=utf-8")]
    safe = [(k.encode(), v.encode()) for k, v in _HEADERS.items()]
    length = [(b"content-length", str(len(body)).encode()), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": [*given, *safe, *length]})
    await send({"type": "http.response.body", "body": body})
