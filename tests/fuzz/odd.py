"""Values that a request should not have, or that few clients send."""

from typing import Any

from serve_app import lease
from tests.fuzz.case import BOUNDARY

# In JSON bodies.
WRONG: tuple[Any, ...] = (
    None, True, -1, 0, 0.5, 2**31, 2**63, 10**40, -(10**400), 1e308, float("nan"), float("inf"), "", " ", "\0",
    "\ud800", "🙂", "a\r\nb: c", "x" * 5000, "5000", "true", [], {}, [[]], [None], ["\0"], {"": None}, {"role": 1},
    [{"content": 7}],
)  # fmt: skip
FIELDS = (
    "model", "stream", "store", "background", "previous_response_id", "max_tokens", "max_completion_tokens", "n",
    "user", "max_output_tokens", "metadata", "safety_identifier", "stream_options", "messages", "prompt", "input",
    "fake", "", "\0", "\ud800", "__proto__", "x" * 1000,
)  # fmt: skip
# What the scripted engine does when it is asked to, that a client may see.
SCRIPTED = ({"status": 400}, {"status": 404}, {"status": 422}, {"status": 429}, {"first_token_s": 0.05})
BYTES = (
    b"\xff", b"\0", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\\ud800", b"\\", b'"', b"{", b"]", b",", b"\n", b"\xc3", b"9",
)  # fmt: skip
# In headers.
TYPES = (
    b"", b"text/plain", b"application/json; charset=utf-16", b"application/json; charset=nope", b"APPLICATION/JSON",
    b"application/vnd.x+json", b"application/x-www-form-urlencoded", b"multipart/form-data", b"\xff/\xfe", b";",
    b"a" * 9000, b"multipart/form-data; boundary=", b"multipart/form-data; boundary=\xff",
    b'multipart/form-data; boundary="', b"multipart/form-data; charset=nope; boundary=" + BOUNDARY,
    b"multipart/form-data; charset=utf-16; boundary=" + BOUNDARY, b"multipart/form-data; boundary=" + b"b" * 5000,
    b"application/json, application/json",
)  # fmt: skip
NUMBERS = (b"", b"0", b"-1", b"nan", b"inf", b"1e400", b"1e-320", b"0.02", b"1", b"\xd9\xa3", b"1 ", b"0x1", b"9" * 400)
VALUES = (
    b"", b"1", b"true", b"no", b"\xff\xfe\x80", b"\xe2\x82\xac", b"a\tb", b"a, b", b"x" * 9000, b"%0d%0aa: b",
    b"-" * 200,
)  # fmt: skip
HOSTS = (
    b"", b"[::1", b"[", b"]", b"a b", b"a/v1/messages", b"a?b", b"a#b", b"@", b"\xff", b"h:99999999", b"h:x",
    b"x" * 9000,
)  # fmt: skip
LENGTHS = (b"", b"0", b"1", b"-1", b"+4", b"0x10", b"1" * 30, b"4, 4", b"\xff")
PASSED_ON = (b"accept", b"traceparent", b"tracestate", b"anthropic-version")
PRIVATE = (
    lease.LEASE_HEADER, lease.ASKED_MODEL_HEADER, lease.REFUSED_HEADER, lease.KEEP_HEADER, lease.RESUME_HEADER,
    lease.GENERATION_HEADER, lease.KEPT_HEADER, lease.COUNT_HEADER,
)  # fmt: skip
METHODS = (
    b"GET", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"HEAD", b"TRACE", b"PROPFIND", b"FOO", b"post", b"M-SEARCH",
)  # fmt: skip
# In request lines; none of them reaches anything but the gateway itself.
PATHS = (
    b"/", b"//", b"*", b"/v1", b"/v1/", b"/v1/models", b"/v1/models/", b"/v1/models/chat", b"/v1/models/org/chat",
    b"/v1/models/org%2Fchat", b"/v1/models/%00", b"/v1/models/%ff%fe", b"/v1/models/%ed%a0%80",
    b"/v1/models/" + b"a" * 9000, b"/v1/models/nothing", b"/v1/models/asleep", b"/health", b"/health/", b"/ready",
    b"/ready?model=chat", b"/ready?model=broken", b"/ready?model=%ff", b"/ready?model=", b"/ready?model=a&model=b",
    b"/ready?" + b"a=b&" * 2000, b"/docs", b"/redoc", b"/openapi.json", b"/docs/oauth2-redirect", b"/metrics",
    b"/invocations", b"/v1/load_lora_adapter", b"/v1/responses/resp_1", b"/v1/responses/resp_1/cancel",
    b"/modelyard/alive", b"/generate/", b"/v1/messages/", b"/v1/messages/batches", b"/v1/messagesque",
    b"http://other/v1/models", b"http://[/v1/models", b"/%2e%2e/%2e%2e/etc/passwd", b"/../..", b"/a b", b"/\xff",
    b"/?a#b", b"//v1/chat/completions", b"/v1//chat/completions", b"/v1/chat/completions?model=chat", b"other:443",
)  # fmt: skip
