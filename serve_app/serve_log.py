"""Serve's logger, ``ray.serve``, and who may write of requests there: the gateway's access log alone."""

import logging

# Below Serve's own logger: its handlers, encoding and level are those of the lines.
access = logging.getLogger("ray.serve.access")
# What Serve marks its own lines for requests with, so that its `enable_access_log` rules ours.
AS_SERVE = {"serve_access_log": True}


def leave_out_serves_lines() -> None:
    """Serve's own line for each request says less than ours, and for each lease nothing.

    Not by a deployment's ``logging_config``: that would take the place of the one in the file.
    """
    # A logger's filter does not see what comes from the loggers below it.
    logging.getLogger("ray.serve").addFilter(_is_not_serves)


def _is_not_serves(entry: logging.LogRecord) -> bool:
    return not any(hasattr(entry, mark) for mark in AS_SERVE)
