"""The speed of an engine in tokens per second."""

import pytest

from serve_app.model.token_rate import WINDOW_S, TokenRate


def test_the_rate_is_that_of_the_last_seconds() -> None:
    """Steady at its value, within a second's share; gone after the window; right from the first second on."""
    now = [5.0]
    rate = TokenRate(lambda: now[0])
    for step in range(100 * WINDOW_S):
        rate.add(3)
        now[0] += 0.01
        if step > 200:
            assert rate.per_second() == pytest.approx(300, rel=0.11)
    assert len(rate._counts) <= WINDOW_S + 1
    now[0] += WINDOW_S + 1
    assert rate.per_second() == 0
