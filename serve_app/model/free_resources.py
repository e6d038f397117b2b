"""What the cluster has, and what of it is free now. Reads Ray and decides nothing."""

import logging

import ray

from serve_app.planning.nodes import Node

logger = logging.getLogger("ray.serve")

TIMEOUT_S = 5


def cluster_nodes() -> tuple[Node, ...]:
    """The nodes with what each has in all; none where there is no Ray or it does not answer."""
    if not ray.is_initialized():
        return ()
    try:
        return tuple(Node(n["NodeID"], n["Resources"], n.get("Labels") or {}) for n in ray.nodes() if n["Alive"])
    except Exception as error:  # a deployment that finds no room waits, as it does without this
        logger.warning("could not read what the cluster has: %r", error)
        return ()


def free_resources() -> tuple[Node, ...] | None:
    """The nodes with what is free on each; None where there is no Ray or it does not answer.

    ``ray.available_resources`` knows the sum over all nodes only, and tensor parallelism needs one node.
    """
    if not ray.is_initialized():
        return None
    try:
        from ray.autoscaler.v2.sdk import get_cluster_status

        status = get_cluster_status(ray.get_runtime_context().gcs_address, TIMEOUT_S)
        return tuple(
            Node(node.node_id, node.available_resources(), node.labels or {})
            for node in (*status.active_nodes, *status.idle_nodes)
        )
    except Exception as error:  # an update that stops the old replica first is better than none
        logger.warning("could not read what is free in the cluster: %r", error)
        return None
