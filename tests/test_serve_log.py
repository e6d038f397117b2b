"""Who writes of requests into Serve's log."""

import logging
from collections.abc import Iterator

import pytest

from serve_app import serve_log


@pytest.fixture
def serves() -> Iterator[logging.Logger]:
    """Serve's logger, as a deployment of ours leaves it."""
    logger = logging.getLogger("ray.serve")
    before, level = list(logger.filters), logger.level
    logger.setLevel(logging.INFO)
    serve_log.leave_out_serves_lines()
    yield logger
    logger.filters[:] = before
    logger.setLevel(level)


def test_the_access_log_is_ours_alone(serves: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    """Serve's line for a request goes nowhere; ours, under the same mark, and all else come through."""
    serves.addHandler(caplog.handler)
    serves.info("POST / 200 3.5ms", extra={"skip_context_filter": True, "serve_access_log": True})
    serve_log.access.info("{}", extra=serve_log.AS_SERVE)
    serves.info("anything else")
    serves.removeHandler(caplog.handler)
    told = [entry.getMessage() for entry in caplog.records]
    assert "POST / 200 3.5ms" not in told
    assert {"{}", "anything else"} <= set(told)
