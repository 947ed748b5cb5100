"""The request router of Ray Serve: the replica of the conversation or of the prefix, by server.affinity."""

from __future__ import annotations

from collections import Counter

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from server.affinity.chooser import ReplicaChooser
from server.replicas.routing_header import decode_keys, requested_replica


class AffinityRouter(RequestRouter):
    """One chooser for each proxy; its keys arrive as the session id."""

    def initialize_state(self, **_: object) -> None:
        """Called by Ray after the constructor."""
        self._chooser = ReplicaChooser()
        self._running: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, the best first; a replica with a full queue passes the request on to the next rank."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None or not replicas:
            return [candidate_replicas]
        # Without it a request for full replicas would poll them without a pause.
        pending_request.routing_context.should_backoff = True
        if self._chooser.replicas != replicas.keys():
            self._chooser.replace(replicas)
            self._running = Counter({name: self._running[name] for name in replicas})
        session = pending_request.metadata.session_id
        requested = requested_replica(session)
        if requested is not None:
            return [[replica] for name, replica in replicas.items() if name == requested] or [candidate_replicas]
        loads = {name: float(self._load(replica)) for name, replica in replicas.items()}
        chosen = self._chooser.choose(decode_keys(session), loads)
        others = [replica for name, replica in replicas.items() if name not in chosen]
        return [[replicas[name]] for name in chosen] + ([others] if others else [])

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Record that the cache of a replica has the prompt."""
        session = pending_request.metadata.session_id
        if requested_replica(session) is None:
            # Without keys, too: the next request without keys gets another choice of replicas.
            self._chooser.record(decode_keys(session), replica_id.unique_id)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request that is sent to a replica; `on_request_completed` follows."""
        super().on_send_request(replica_id)
        self._running[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count the end of a request, also of one that failed, was cancelled or could not be sent."""
        name = replica_id.unique_id
        self._running[name] = max(self._running[name] - 1, 0)

    def _load(self, replica: RunningReplica) -> int:
        """Requests of this proxy, or of all by the last answer of the replica, which Ray forgets after 10 seconds."""
        known = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return max(known, self._running[replica.replica_id.unique_id])
