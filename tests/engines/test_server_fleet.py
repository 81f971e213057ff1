"""ServerFleet: which server a request goes to, and memory that is released and resumed; decisions without HTTP."""

import asyncio

from lightrl.engines import Timeouts
from lightrl.engines.servers.fleet import MAX_LOSSES, MAX_SESSIONS, WITHIN_VERSIONS, ServerFleet
from lightrl.engines.servers.processes.process import ServerProcess
from lightrl.engines.servers.router import Router
from lightrl.engines.servers.server import SPEED_ANSWERS, Server
from lightrl.engines.sglang.client import SGLangClient


def server_at(name: str) -> Server:
    return Server(SGLangClient(f"http://{name}"))


def fleet_of(*names: str, version: int = 0) -> tuple[ServerFleet, list[Server]]:
    """Routable servers."""
    fleet = ServerFleet(max_lead_tokens=100)
    servers = [fleet.join(server_at(name)) for name in names]
    for server in servers:
        fleet.admit(server, version)
    return fleet, servers


def test_a_server_gets_requests_only_after_it_acknowledged_weights() -> None:
    fleet = ServerFleet()
    server = fleet.join(server_at("a"))
    assert fleet.choose("s") is None
    fleet.admit(server, 3)
    assert fleet.choose("s") is server


def test_the_server_with_the_fewest_outstanding_tokens_is_chosen() -> None:
    fleet, (a, b, c) = fleet_of("a", "b", "c")
    router = Router(fleet, timeouts=Timeouts())
    for server, tokens in ((a, 50), (b, 20), (c, 90)):
        router.start_request(server, tokens)
    assert fleet.choose("new") is b
    router.end_request(c, 90)
    assert fleet.choose("other") is c


def test_a_session_stays_unless_its_server_is_too_far_ahead_of_the_least_busy_one() -> None:
    fleet, _ = fleet_of("a", "b")
    home = fleet.choose("s")
    home.outstanding_tokens = 100
    assert fleet.choose("s") is home
    home.outstanding_tokens = 101
    assert fleet.choose("s") is not home


def test_a_lost_server_gets_nothing_and_its_sessions_move() -> None:
    fleet, _ = fleet_of("a", "b")
    home = fleet.choose("s")
    assert fleet.lose(home, "gone")
    assert not fleet.lose(home, "gone again")
    assert fleet.choose("s") not in (None, home)


def test_versions_of_a_trajectory_never_decrease() -> None:
    fleet, _ = fleet_of("old")
    new = fleet.join(server_at("new"))
    fleet.admit(new, 2)
    new.outstanding_tokens = 1000
    assert fleet.choose("s", min_version=1) is new
    assert fleet.choose("s", min_version=3) is None


def test_a_server_that_just_failed_is_avoided_where_there_is_another() -> None:
    fleet, (a, b) = fleet_of("a", "b")
    assert fleet.choose("s", excluded={a}) is b
    assert fleet.choose("t", excluded={a, b}) in (a, b)


def test_there_is_hope_while_a_server_is_started_again_and_none_when_it_is_given_up() -> None:
    fleet = ServerFleet()
    server = fleet.join(Server(SGLangClient("http://a"), ServerProcess(["true"])))
    assert fleet.lose(server, "killed")
    assert server.state == "restarting"
    assert fleet.has_hope()
    fleet.lose(server, "three times", is_given_up=True)
    assert not fleet.has_hope()
    assert "three times" in fleet.describe()


def test_a_server_that_joined_again_is_another_one() -> None:
    fleet, (before,) = fleet_of("a")
    after = fleet.join(server_at("a"))
    assert not fleet.lose(before, "its process ended")
    assert after.state == "starting"


def test_a_run_without_loads_remembers_a_bounded_number_of_sessions() -> None:
    fleet, (server,) = fleet_of("a")
    for number in range(MAX_SESSIONS + 10):
        fleet.choose(str(number))
        assert len(fleet.sessions) <= MAX_SESSIONS
    assert fleet.sessions[str(MAX_SESSIONS + 9)] == server.url


def test_a_server_that_leaves_gets_no_new_request_and_finishes_those_it_has() -> None:
    fleet, (leaving, staying) = fleet_of("leaving", "staying")
    leaving.num_requests = 1
    assert fleet.drain(leaving)
    assert {fleet.choose(f"session {number}") for number in range(20)} == {staying}
    assert fleet.in_state("starting", "routable") == [staying]
    leaving.num_requests = 0
    assert not fleet.drain(leaving)


def lose_and_return(fleet: ServerFleet, server: Server, steady: Server, num: int, *, versions_apart: int) -> None:
    for _ in range(num):
        assert fleet.lose(server, "gone")
        server.rejoin()
        version = steady.weight_version + versions_apart
        for one in fleet.in_state():
            fleet.admit(one, version)


def test_a_server_that_flaps_is_retired_and_counts_as_no_hope() -> None:
    fleet, (flapping, steady) = fleet_of("flapping", "steady")
    lose_and_return(fleet, flapping, steady, MAX_LOSSES - 1, versions_apart=1)
    assert fleet.lose(flapping, "gone again")
    assert flapping.state == "retired"
    assert "the last time: gone again" in flapping.reason
    fleet.lose(steady, "gone", is_given_up=True)
    assert not fleet.has_hope()


def test_a_server_that_is_lost_now_and_then_may_return() -> None:
    fleet, (rare, steady) = fleet_of("rare", "steady")
    lose_and_return(fleet, rare, steady, 3 * MAX_LOSSES, versions_apart=WITHIN_VERSIONS)
    assert rare.state == "routable"


def test_the_last_server_is_never_retired() -> None:
    fleet, (flapping, steady) = fleet_of("flapping", "steady")
    fleet.lose(steady, "gone")
    for _ in range(3 * MAX_LOSSES):
        assert fleet.lose(flapping, "gone")
        flapping.rejoin()
        fleet.admit(flapping, 0)
    assert fleet.has_hope()


def test_a_server_that_is_slower_than_the_others_by_a_factor_is_named_once_until_it_has_recovered() -> None:
    fleet, servers = fleet_of("slow", "a", "b")
    slow, *others = (server.url for server in servers)

    def answers(num: int, slow_s: float) -> list[str]:
        messages = [fleet.note_answer(url, 1.0, 100) for _ in range(num) for url in others]
        messages += [fleet.note_answer(slow, slow_s, 100) for _ in range(num)]
        return [message for message in messages if message is not None]

    assert not answers(SPEED_ANSWERS, 1.0)
    (message,) = answers(4 * SPEED_ANSWERS, 4.0)
    assert message.startswith("The server at http://slow takes 3")  # something above 30 ms
    assert "the others take 10 ms" in message
    assert not answers(10 * SPEED_ANSWERS, 1.0)
    assert len(answers(4 * SPEED_ANSWERS, 5.0)) == 1


def test_one_server_alone_is_not_slow() -> None:
    fleet, (server,) = fleet_of("a")
    assert not any(fleet.note_answer(server.url, 10.0 * number, 1) for number in range(3 * SPEED_ANSWERS))


class Client(SGLangClient):
    """Remembers what it was asked to release and to resume."""

    def __init__(self) -> None:
        super().__init__("http://a")
        self.released: list[str] = []
        self.resumed: list[str] = []

    async def release_memory(self, tags=None):
        self.released += tags

    async def resume_memory(self, tags=None):
        self.resumed += tags


def test_weights_come_back_first_the_cache_last_and_a_server_that_was_lost_resumes_nothing() -> None:
    fleet, client = ServerFleet(), Client()
    server = fleet.join(Server(client))

    async def scenario() -> None:
        await server.release_memory()
        await server.release_memory()
        assert client.released == ["weights", "cuda_graph", "kv_cache"]
        await server.resume_memory(["weights"])
        await server.resume_memory()
        assert client.resumed == ["weights", "cuda_graph", "kv_cache"]
        await server.release_memory()
        fleet.lose(server, "its process ended")
        await server.resume_memory()

    asyncio.run(scenario())
    assert client.resumed == ["weights", "cuda_graph", "kv_cache"]
