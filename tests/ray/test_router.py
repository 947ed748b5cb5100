"""The router and the app of a replica without a cluster: loads, choices, cancelled requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import TaskCancelledError
from ray.serve._private.common import DeploymentID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest
from ray.serve.request_router import ReplicaID, RunningReplica

from server.affinity.keys import RequestKeys
from server.replicas.deployment import ReplicaApp
from server.replicas.router import AffinityRouter
from server.replicas.routing_header import REPLICA_HEADER, encode_keys

pytestmark = pytest.mark.ray

DEPLOYMENT = DeploymentID("cellar", "cellar")
NAMES = ("one", "two")


class QueueLengths:
    """Ray's cache of queue lengths, which forgets them after 10 seconds."""

    def __init__(self) -> None:
        self.lengths: dict[ReplicaID, int] = {}

    def get(self, replica: ReplicaID) -> int | None:
        """The length, if it is known."""
        return self.lengths.get(replica)


class Cluster:
    """A router of two replicas, as Ray drives it."""

    def __init__(self) -> None:
        self.router = object.__new__(AffinityRouter)
        self.router._use_replica_queue_len_cache = False
        self.router._replica_queue_len_cache = self.lengths = QueueLengths()
        self.router.initialize_state()
        self.ids = {name: ReplicaID(name, DEPLOYMENT) for name in NAMES}

    def choose(self, keys: RequestKeys, *, among: tuple[str, ...] = NAMES) -> str:
        """The first choice of a request."""
        replicas = [cast(RunningReplica, SimpleNamespace(replica_id=self.ids[name])) for name in among]
        ranks = asyncio.run(self.router.choose_replicas(replicas, request(keys)))
        return str(ranks[0][0].replica_id.unique_id)

    def send(self, name: str, keys: RequestKeys) -> None:
        """Send a request that the replica accepts."""
        self.router.on_send_request(self.ids[name])
        self.router.on_request_routed(request(keys), self.ids[name], None)

    def end(self, name: str) -> None:
        """End a request, well or not."""
        self.router.on_request_completed(self.ids[name], "")


def request(keys: RequestKeys) -> PendingRequest:
    metadata = RequestMetadata(request_id="", internal_request_id="", session_id=encode_keys(keys))
    return PendingRequest(args=[], kwargs={}, metadata=metadata, future=cast(Any, None))


def test_long_streams_count_after_ray_has_forgotten_them() -> None:
    """And every request counts until it ends."""
    cluster = Cluster()
    for _ in range(20):
        name = cluster.choose(RequestKeys())
        cluster.send(name, RequestKeys())
    loads = [cluster.router._running[name] for name in NAMES]
    assert [10, 10] == loads

    for _ in range(10):
        cluster.end("one")
    assert ["one"] * 10 == [cluster.choose(RequestKeys(f"c{number}")) for number in range(10)]


def test_requests_of_other_proxies_count_by_the_answer_of_the_replica() -> None:
    cluster = Cluster()
    cluster.lengths.lengths[cluster.ids["one"]] = 9

    assert {"two"} == {cluster.choose(RequestKeys(f"c{number}")) for number in range(8)}


def test_an_end_without_a_beginning_leaves_no_negative_load() -> None:
    """Ray reports the end of a request that it could not send."""
    cluster = Cluster()
    cluster.choose(RequestKeys())
    for _ in range(5):
        cluster.end("one")
    cluster.send("one", RequestKeys())

    assert {"two"} == {cluster.choose(RequestKeys(f"c{number}")) for number in range(8)}


def test_a_replica_that_ended_has_no_load_left() -> None:
    """Its late ends change nothing."""
    cluster = Cluster()
    cluster.choose(RequestKeys())
    for _ in range(4):
        cluster.send("one", RequestKeys("c"))
    assert "two" == cluster.choose(RequestKeys("c"), among=("two",))
    cluster.end("one")

    assert {"one", "two"} == {cluster.choose(RequestKeys(f"c{number}")) for number in range(30)}


def test_requests_without_keys_meet_all_replicas() -> None:
    """Such as those for /v1/models."""
    cluster, found = Cluster(), set()
    for _ in range(30):
        name = cluster.choose(RequestKeys())
        cluster.send(name, RequestKeys())
        cluster.end(name)
        found.add(name)

    assert set(NAMES) == found


def test_a_conversation_stays_at_its_replica() -> None:
    cluster = Cluster()
    cluster.choose(RequestKeys())
    cluster.send("two", RequestKeys("c", ("p",)))

    assert ["two"] * 8 == [cluster.choose(RequestKeys("c")) for _ in range(8)]


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_a_cancelled_request_is_a_disconnect(kind: str) -> None:
    """Ray cancels the call that receives the messages of the client."""
    received: list[Any] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        received.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        raise TaskCancelledError

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(ReplicaApp(app, "r1")({"type": kind, "headers": []}, receive, send))
    assert [{"type": f"{kind}.disconnect"}] == received
    assert (REPLICA_HEADER.encode(), b"r1") in sent[0]["headers"]


@pytest.mark.parametrize(("requested", "status"), [("r1", 200), ("r2", 404)])
def test_a_request_for_another_replica_is_refused(requested: str, status: int) -> None:
    """It has ended: its metrics are not those of this one."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(REPLICA_HEADER.encode(), requested.encode())]
    scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": headers}
    asyncio.run(ReplicaApp(app, "r1")(scope, cast(Any, None), send))
    assert status == sent[0]["status"]
