"""How Serve chooses a replica for a new lease: power of two choices, past the replicas that have gone silent.

It also passes on, the moment Serve says it, which replicas run (``serve_app.replica_watch``).

Serve pickles this class by value, with the globals that it uses, into the model's deployment and unpickles it wherever
a handle to the model is used. So no state of a process may be a global here: ``replica_watch`` is imported there.
"""

import random

from ray.serve.request_router import (
    LocalityMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from serve_app import replica_watch


class ModelRouter(LocalityMixin, RequestRouter):  # type: ignore[misc]
    """For handles to ``Model``. Not Serve's ``FIFOMixin``: it gives what was chosen for one call to whichever call is
    the oldest, and who is next is decided in the gateways' own queues."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one that the caller would like, while it has room; else two at random, of which Serve takes the one with
        fewer leases, or asks again a little later where both are full.

        None while every replica is shunned: Serve waits (half a second at most) and asks again until the marks end.
        """
        near = self.apply_locality_routing(pending_request)
        watch = replica_watch.WATCH
        open_to = [
            replica
            for replica in candidate_replicas
            if replica.replica_id in near and not watch.is_shunned(self.app_name, replica.replica_id.unique_id)
        ]
        two = random.sample(open_to, min(2, len(open_to)))
        wanted = pending_request.args[0] if pending_request is not None and pending_request.args else ""
        first = [replica for replica in open_to if replica.replica_id.unique_id == wanted]
        return [first, two] if first else [two]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's controller says who may get requests: a replica that is told to stop is missing from then on."""
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A call to the replica found it dead, before the controller did."""
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        replica_watch.WATCH.update(self.app_name, (replica.unique_id for replica in self.curr_replicas))
