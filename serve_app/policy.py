"""Serve's side of scaling: two autoscaling policies, run by Serve's controller a few times a second.

* ``queue_depth`` (``config.QUEUE_DEPTH``) is what a deployment file names for its ``Model``: it asks
  ``serve_app.scaling`` how many replicas.
* ``card_signals`` belongs to every ``Card``, of which there is always one: it changes nothing, but sees the numbers
  that the card records, of engines and gateways, within a second and at zero replicas too.

Neither may raise: Serve would leave out the applications after this one.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ray.serve.config import AutoscalingContext

from serve_app import signal_board
from serve_app.config import Scaling
from serve_app.scaling import Fleet, Signals, State, decide

logger = logging.getLogger("ray.serve")

_STATE = "modelyard"
_UNKNOWN = -1.0


def queue_depth(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """The number of replicas that ``serve_app.scaling.decide`` wants."""
    state = ctx.policy_state.get(_STATE) or State()
    wanted = ctx.target_num_replicas
    try:
        numbers = signal_board.read(ctx.app_name)
        signals, scaling = from_numbers(numbers) if numbers is not None else (None, Scaling())
        fleet = Fleet(
            running=ctx.current_num_replicas,
            wanted=ctx.target_num_replicas,
            least=ctx.capacity_adjusted_min_replicas,
            most=ctx.capacity_adjusted_max_replicas,
        )
        wanted, state = decide(signals, fleet, scaling, state, time.monotonic())
        if wanted != ctx.target_num_replicas:
            logger.info("%s: %d replicas instead of %d: %s", ctx.app_name, wanted, ctx.target_num_replicas, signals)
        # Serve would delay and damp what was decided. It looks at the context after this call.
        no_delay = {"upscale_delay_s": 0.0, "downscale_delay_s": 0.0, "downscale_to_zero_delay_s": 0.0}
        ctx.config = ctx.config.model_copy(update=no_delay | {"upscaling_factor": 1.0, "downscaling_factor": 1.0})
    except Exception:
        logger.exception("the scaling of %s failed; it keeps %d replicas", ctx.app_name, wanted)
    return wanted, {_STATE: state}


def card_signals(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Puts the newest numbers of the application's card where ``queue_depth`` reads them."""
    try:
        newest: dict[str, float] = {}
        stamp = 0.0
        # While a card is rolled there are two.
        for replica in ctx.running_replicas:
            points = {name: by[replica][-1] for name, by in ctx.raw_metrics.items() if by.get(replica)}
            at = max((point.timestamp for point in points.values()), default=0.0)
            if at > stamp:
                newest, stamp = {name: point.value for name, point in points.items()}, at
        if newest:
            signal_board.tell(ctx.app_name, newest, stamp)
    except Exception:
        logger.exception("could not read the signals of %s", ctx.app_name)
    return ctx.target_num_replicas, {}


def as_numbers(signals: Signals, scaling: Scaling) -> dict[str, float]:
    """What a card records: Serve carries numbers by name, and nothing else."""
    numbers = asdict(signals) | scaling.model_dump()
    return {name: _UNKNOWN if value is None else float(value) for name, value in numbers.items()}


def from_numbers(numbers: Mapping[str, float]) -> tuple[Signals, Scaling]:
    placeable = numbers["placeable"]
    signals = Signals(
        replicas=int(numbers["replicas"]),
        running=int(numbers["running"]),
        waiting=int(numbers["waiting"]),
        kv_usage=numbers["kv_usage"],
        held=int(numbers["held"]),
        slots=int(numbers["slots"]),
        placeable=None if placeable == _UNKNOWN else int(placeable),
        tokens_s=numbers["tokens_s"],
    )
    return signals, Scaling.model_validate({name: numbers[name] for name in Scaling.model_fields})
