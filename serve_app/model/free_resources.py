"""What is free in the cluster now. Reads Ray and decides nothing."""

import logging

import ray

logger = logging.getLogger("ray.serve")

TIMEOUT_S = 5


def free_resources() -> dict[str, dict[str, float]] | None:
    """Free resources by node id, by Ray's resource names; None where there is no Ray or it does not answer.

    ``ray.available_resources`` knows the sum over all nodes only, and tensor parallelism needs one node.
    """
    if not ray.is_initialized():
        return None
    try:
        from ray.autoscaler.v2.sdk import get_cluster_status

        status = get_cluster_status(ray.get_runtime_context().gcs_address, TIMEOUT_S)
        return {node.node_id: node.available_resources() for node in (*status.active_nodes, *status.idle_nodes)}
    except Exception as error:  # an update that stops the old replica first is better than none
        logger.warning("could not read what is free in the cluster: %r", error)
        return None
