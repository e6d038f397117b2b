"""How many streams the limit on a process's open files allows."""

import resource

# For all that is no stream: Ray's and Serve's own sockets, logs, libraries.
SPARE = 500

REMEDY = "For more, raise the limit on open files (`ulimit -n`, systemd's LimitNOFILE) and start Ray again."


def most_streams(files_each: float = 2) -> int:
    """Raise this process's limit as far as it may itself, and say how many streams that allows at once, of which each
    takes so many files: mostly its client's socket, and the one to where its answer comes from."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(1, int((hard - SPARE) / files_each))
