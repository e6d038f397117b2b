"""Requests made wrong on purpose, from a valid one of every route: bodies, headers, paths, and clients that leave."""

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from serve_app.gateway.routes import RELAYED
from tests.fuzz import odd
from tests.fuzz.case import BOUNDARY, Case, Headers

JSON: Headers = ((b"content-type", b"application/json"),)
MULTIPART: Headers = ((b"content-type", b"multipart/form-data; boundary=" + BOUNDARY),)

_TALK = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "two words"}]
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
_CHAT: dict[str, Any] = {"model": "chat", "messages": _TALK, "max_tokens": 4, "temperature": 0.5, "user": "u"}
_MESSAGES = {"model": "chat", "messages": _TALK, "max_tokens": 4, "metadata": {"user_id": "u"}}
# Per route, bodies that work.
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        _CHAT,
        _CHAT | {"stream": True, "stream_options": {"include_usage": True}},
        _CHAT | {"model": "capped", "max_completion_tokens": 7, "response_format": _SCHEMA},
        _CHAT | {"model": "either", "stream": True, "n": 1},
        _CHAT | {"model": "org/chat", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        _CHAT | {"model": "narrow", "stream": True},
    ],
    "/v1/completions": [
        {"model": "chat", "prompt": "once", "max_tokens": 3},
        {"model": "stand-in", "prompt": ["once", "upon"], "stream": True, "stop": ["\n"]},
    ],
    "/v1/responses": [{"model": "chat", "input": "hi", "store": False}, {"model": "capped", "input": _TALK}],
    "/v1/embeddings": [{"model": "embed", "input": "hi"}, {"model": "embed", "input": ["a", "b"], "dimensions": 2}],
    "/v1/rerank": [{"model": "rank", "query": "sea", "documents": ["a", "b"], "top_n": 1}],
    "/v1/score": [{"model": "rank", "text_1": "sea", "text_2": ["ocean"]}],
    "/v1/messages": [_MESSAGES, _MESSAGES | {"model": "capped", "system": "Be brief"}],
    "/v1/messages/count_tokens": [{"model": "chat", "messages": _TALK}],
    "/tokenize": [{"model": "chat", "prompt": "hi"}],
    "/detokenize": [{"model": "chat", "tokens": [1, 2, 3]}],
    "/generate": [{"model_name": "chat", "prompt": "hi", "max_tokens": 3, "temperature": 0.0}],
}
MODELS = ("chat", "org/chat", "capped", "either", "stand-in", "narrow", "embed", "rank", "whisper", "asleep", "broken")


class Mutations:
    """An endless run of cases. ``keys``: of the gateway, one that may do everything first; none: it has no keys."""

    def __init__(self, random: Random, keys: Sequence[str] = ()) -> None:
        self._random = random
        self._keys = keys

    def __iter__(self) -> Iterator[Case]:
        while True:
            yield self._next()

    def _next(self) -> Case:
        some = self._random
        case = self._valid()
        if some.random() < 0.1:
            return case
        changes: list[Callable[[Case], Case]] = [self._body] * 5 + [self._headers] * 3
        changes += [self._path, self._method]
        for _ in range(some.choice((1, 1, 1, 2, 3))):
            case = some.choice(changes)(case)
        if case.sends is None and some.random() < 0.1:
            case = self._chunked(case)
        if case.sends is None and some.random() < 0.15:
            case = self._leaving(case)
        return replace(case, origin="mutation", valid=False, pieces=some.choice((1, 1, 1, 2, 5)))

    def _valid(self) -> Case:
        paths = [*(route.path for route in RELAYED), "/generate", "/v1/chat/completions", "/v1/completions"]
        path = self._random.choice(paths)
        if path not in BODIES:
            form = _part(b'name="model"', b"whisper") + _part(b'name="file"; filename="a.wav"', b"RIFF\0\xff")
            body, headers = form + b"--" + BOUNDARY + b"--\r\n", MULTIPART
        else:
            body, headers = json.dumps(self._random.choice(BODIES[path])).encode(), JSON
        return Case("valid", b"POST", path.encode(), headers + self._key(), body, valid=True)

    def with_key(self, case: Case) -> Case:
        return replace(case, headers=case.headers + self._key())

    def _key(self) -> Headers:
        return ((b"authorization", b"Bearer " + self._keys[0].encode()),) if self._keys else ()

    # Bodies

    def _body(self, case: Case) -> Case:
        some = self._random
        if b'"fake"' in case.body:
            return case  # what the script is told stays as it is meant
        if case.headers[:1] == MULTIPART:
            return some.choice((self._form, self._garbled))(case)
        return some.choice((self._field, self._field, self._field, self._duplicate, self._nested, self._garbled))(case)

    def _field(self, case: Case) -> Case:
        """One field, anywhere in it, dropped, replaced, or added."""
        some = self._random
        body = _parsed(case.body)
        if body is None:
            return self._garbled(case)
        holder, key = some.choice(list(_places(body)))
        match some.randrange(6):
            case 0:
                del holder[key]
            case 1:
                holder[key] = [holder[key]]
            case 2:
                body[some.choice(odd.FIELDS)] = some.choice(odd.WRONG)
            case 3:
                body["model"] = some.choice(MODELS)
            case 4:
                body["fake"] = some.choice((*odd.SCRIPTED, {"fail": 2}) if body.get("stream") is True else odd.SCRIPTED)
            case _:
                holder[key] = some.choice(odd.WRONG)
        return replace(case, body=json.dumps(body).encode())

    def _duplicate(self, case: Case) -> Case:
        """A field that is there twice, with another value."""
        some = self._random
        name, value = (
            json.dumps(some.choice(odd.FIELDS)).encode(),
            json.dumps(some.choice((*odd.WRONG, *MODELS))).encode(),
        )
        if some.random() < 0.5:
            return replace(case, body=case.body.rstrip()[:-1] + b", " + name + b": " + value + b"}")
        return replace(case, body=b"{" + name + b": " + value + b", " + case.body.lstrip()[1:])

    def _nested(self, case: Case) -> Case:
        some = self._random
        depth = some.choice((5, 50, 300, 900, 950, 1000, 1100, 5000, 100_000))
        name = some.choice((b"messages", b"metadata", b"max_tokens", b"x"))
        opening, closing = some.choice(((b"[", b"]"), (b'{"a":', b"}")))
        deep = opening * depth + b"1" + closing * some.choice((depth, depth, depth - 1, 0))
        return replace(case, body=case.body.rstrip()[:-1] + b', "' + name + b'": ' + deep + b"}")

    def _garbled(self, case: Case) -> Case:
        some = self._random
        body = case.body
        at = some.randrange(len(body) + 1)
        match some.randrange(8):
            case 0:
                body = body[:at]
            case 1:
                body = body[at:]
            case 2:
                body = body[:at] + body[at + some.randrange(1, 9) :]
            case 3:
                body = some.choice((b"", b"null", b"[]", b"7", b'"chat"', b"{}", body + body, b" " * 3000 + body))
            case 4:
                body = body.decode("utf-8", "replace").encode(some.choice(("utf-16", "utf-32", "utf-8-sig")))
            case 5:
                return replace(case, body=gzip.compress(body), headers=(*case.headers, (b"content-encoding", b"gzip")))
            case _:
                body = body[:at] + some.choice(odd.BYTES) + body[at + some.randrange(2) :]
        return replace(case, body=body)

    def _form(self, case: Case) -> Case:
        some = self._random
        wrong = (
            _part(b'name="model"; filename="model"', b"whisper"),
            _part(b'name="model"', b"\xff\xfe"),
            _part(b'name="\xff"', b"x"),
            _part(b'name="model"\r\ncontent-type: text/plain; charset=nope', b"whisper"),
            _part(b"", b"whisper"),
            _part(b'filename="a"', b"x"),
            _part(b'name="model', b"whisper"),
            _part(b'name="m"', b"x") * 1500,
            _part(b'name="m"; filename="f"', b"x") * 1500,
            _part(b'name="m"', b"x" * 1_200_000),
            b"--" + BOUNDARY + b"\r\n\r\nno head\r\n",
            b"--" + BOUNDARY + b"\r\n: nothing\r\n\r\n\r\n",
            b"--" + BOUNDARY + b"\r\ncontent-disposition: form-data; name=" + b"n" * 9000 + b"\r\n\r\nx\r\n",
            b"preamble\r\n",
        )
        junk = some.choice(wrong)
        end = some.choice((b"--" + BOUNDARY + b"--\r\n", b"--" + BOUNDARY + b"--", b"--" + BOUNDARY, b"", b"epilogue"))
        return replace(case, body=some.choice((junk + case.body, junk + end)))

    # Headers

    def _headers(self, case: Case) -> Case:
        some = self._random
        name, value = some.choice(
            (
                (b"content-type", some.choice(odd.TYPES)),
                (b"x-request-id", some.choice(odd.VALUES)),
                (b"x-modelyard-timeout-s", some.choice(odd.NUMBERS)),
                (b"x-modelyard-keep-alive", some.choice(odd.VALUES)),
                (b"x-modelyard-no-fallback", some.choice(odd.VALUES)),
                (some.choice(odd.PRIVATE), some.choice((*odd.VALUES, *odd.NUMBERS))),
                (b"authorization", self._authorization()),
                (b"x-api-key", some.choice((*odd.VALUES, *(key.encode() for key in self._keys)))),
                (
                    some.choice((b"accept", b"traceparent", b"tracestate", b"anthropic-version")),
                    some.choice(odd.VALUES),
                ),
                (some.choice((b"cookie", b"origin", b"accept-encoding", b"x-forwarded-for")), some.choice(odd.VALUES)),
                (b"expect", b"100-continue"),
                (b"connection", some.choice((b"close", b"keep-alive", b"\xff", b"x-request-id"))),
                (b"host", some.choice(odd.HOSTS)),
                (b"content-length", some.choice((*odd.LENGTHS, str(len(case.body) // 2).encode()))),
                (b"transfer-encoding", some.choice((b"chunked", b"gzip", b"chunked, chunked", b"\xff"))),
                (some.choice((b"x y", b"\xff", b"x" * 9000, b"")), b"x"),
                (b"x", b"1\r\n folded: 2"),
            )
        )
        others = case.headers if some.random() < 0.3 else tuple(h for h in case.headers if h[0] != name)
        case = replace(case, headers=(*others, (name, value)))
        # A server that was promised more waits for it; the client has nothing more and leaves.
        waits = name in (b"content-length", b"transfer-encoding")
        return replace(case, sends=len(case.raw), valid=False) if waits else case

    def _authorization(self) -> bytes:
        some = self._random
        key = some.choice((*self._keys, "my-" + "w" * 43)).encode()
        forms = (
            b"Bearer " + key,
            b"bearer   " + key + b" ",
            b"Basic " + key,
            key,
            b"Bearer",
            b"Bearer ",
            b"Bearer \xff",
            b"",
        )
        return some.choice((*forms, b"Bearer " + key * 100, b"Bearer " + key + b"," + key, b"Bearer\t" + key))

    def _chunked(self, case: Case) -> Case:
        """The same body in chunks: a valid one, and one that ends before its end."""
        some = self._random
        size = some.choice((1, 7, 64, 4096)) if len(case.body) < 4096 else 65536
        parts = [case.body[at : at + size] for at in range(0, len(case.body), size)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        rest = tuple(h for h in case.headers if h[0] not in (b"content-length", b"transfer-encoding"))
        case = replace(case, body=body, headers=(*rest, (b"transfer-encoding", b"chunked")))
        if some.random() < 0.3:
            cut = replace(case, body=body[: some.randrange(len(body))])
            return replace(cut, sends=len(cut.raw))
        return case

    # The rest

    def _method(self, case: Case) -> Case:
        return replace(case, method=self._random.choice(odd.METHODS))

    def _path(self, case: Case) -> Case:
        some = self._random
        if some.random() < 0.4:
            suffix = some.choice((b"/", b"?a=b", b"%00", b"%", b";x", b"/..", b"#f", b"%20", b"/x" * 3000))
            return replace(case, target=case.target + suffix)
        target = some.choice((*odd.PATHS, *(path.encode() for path in BODIES)))
        method = case.method if some.random() < 0.3 else b"GET"
        # No body where none is read, mostly.
        return replace(case, target=target, method=method, body=case.body if some.random() < 0.3 else b"")

    def _leaving(self, case: Case) -> Case:
        some = self._random
        if some.random() < 0.5:
            return replace(case, sends=some.randrange(len(case.raw) + 1))
        body = _parsed(case.body)
        if body is not None and body.get("stream") is True and some.random() < 0.5:
            # Only leaving ends this one.
            body = body | {"fake": {"hang": 2}}
            return replace(case, body=json.dumps(body).encode(), reads=some.randrange(1, 400))
        return replace(case, reads=some.randrange(1, 600))


def _part(disposition: bytes, content: bytes) -> bytes:
    return b"--" + BOUNDARY + b"\r\ncontent-disposition: form-data; " + disposition + b"\r\n\r\n" + content + b"\r\n"


def _parsed(body: bytes) -> dict[str, Any] | None:
    """None where it is no object, empty, or too deep to walk."""
    try:
        parsed = json.loads(body) if body.count(b"[") + body.count(b"{") < 200 else None
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) and parsed else None


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every ``(holder, key)`` in it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)
