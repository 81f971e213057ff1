"""ServerPool: which server a request goes to; decisions without HTTP."""

from __future__ import annotations

from lightrl.engines.sglang.pool import MAX_LOSSES, MAX_SESSIONS, SLOW_ANSWERS, WITHIN_VERSIONS, ServerPool


def pool_of(*urls: str, version: int = 0) -> ServerPool:
    pool = ServerPool(max_lead_tokens=100)
    for url in urls:
        pool.join(url)
        pool.admit(url, version)
    return pool


def test_a_server_gets_requests_only_after_it_acknowledged_weights() -> None:
    pool = ServerPool()
    pool.join("a")
    assert pool.choose("s") is None
    pool.admit("a", 3)
    assert pool.choose("s") == "a"


def test_the_server_with_the_fewest_outstanding_tokens_is_chosen() -> None:
    pool = pool_of("a", "b", "c")
    pool.start_request("a", 50)
    pool.start_request("b", 20)
    busy = pool.start_request("c", 90)
    assert pool.choose("new") == "b"
    pool.end_request(busy, 90)
    assert pool.choose("other") == "c"


def test_a_session_stays_unless_its_server_is_too_far_ahead_of_the_least_busy_one() -> None:
    pool = pool_of("a", "b")
    home = pool.choose("s")
    pool.start_request(home, 100)
    assert pool.choose("s") == home
    pool.start_request(home, 1)
    assert pool.choose("s") != home


def test_a_lost_server_gets_nothing_and_its_sessions_move() -> None:
    pool = pool_of("a", "b")
    home = pool.choose("s")
    assert pool.lose(home, "gone")
    assert not pool.lose(home, "gone again")
    assert pool.choose("s") not in (None, home)


def test_versions_of_a_trajectory_never_decrease() -> None:
    pool = pool_of("old")
    pool.join("new")
    pool.admit("new", 2)
    pool.start_request("new", 1000)
    assert pool.choose("s", min_version=1) == "new"
    assert pool.choose("s", min_version=3) is None


def test_a_server_that_just_failed_is_avoided_where_there_is_another() -> None:
    pool = pool_of("a", "b")
    assert pool.choose("s", excluded={"a"}) == "b"
    assert pool.choose("t", excluded={"a", "b"}) in ("a", "b")


def test_there_is_hope_while_a_server_is_started_again_and_none_when_it_is_given_up() -> None:
    pool = pool_of("a")
    pool.lose("a", "killed", comes_back=True)
    assert pool.has_hope()
    pool.lose("a", "three times", comes_back=False)
    assert not pool.has_hope()
    assert "three times" in pool.describe()


def test_a_held_server_gets_nothing_until_it_is_admitted_again() -> None:
    pool = pool_of("a")
    pool.hold("a", "sync")
    assert pool.choose("s") is None
    assert pool.has_hope()
    pool.admit("a", 1)
    assert pool.choose("s") == "a"


def test_a_run_without_loads_remembers_a_bounded_number_of_sessions() -> None:
    pool = pool_of("a")
    for number in range(MAX_SESSIONS + 10):
        pool.choose(str(number))
        assert len(pool.sessions) <= MAX_SESSIONS
    assert pool.sessions[str(MAX_SESSIONS + 9)] == "a"


def test_a_server_that_leaves_gets_no_new_request_and_finishes_those_it_has() -> None:
    pool = pool_of("leaving", "staying")
    request = pool.start_request("leaving", 10)
    assert pool.drain("leaving")
    assert {pool.choose(f"session {number}") for number in range(20)} == {"staying"}
    assert pool.urls("starting", "routable", "syncing") == ["staying"]
    pool.end_request(request, 10)
    assert not pool.drain("leaving")


def lose_and_return(pool: ServerPool, url: str, num: int, *, versions_apart: int) -> None:
    for _ in range(num):
        assert pool.lose(url, "gone", may_return=True)
        pool.join(url)
        for one in pool.urls():
            pool.admit(one, pool.servers["steady"].weight_version + versions_apart)


def test_a_server_that_flaps_is_retired_and_counts_as_no_hope() -> None:
    pool = pool_of("flapping", "steady")
    lose_and_return(pool, "flapping", MAX_LOSSES - 1, versions_apart=1)
    assert pool.lose("flapping", "gone again", may_return=True)
    assert pool.servers["flapping"].state == "retired"
    assert "the last time: gone again" in pool.servers["flapping"].reason
    pool.lose("steady", "gone")
    assert not pool.has_hope()


def test_a_server_that_is_lost_now_and_then_may_return() -> None:
    pool = pool_of("rare", "steady")
    lose_and_return(pool, "rare", 3 * MAX_LOSSES, versions_apart=WITHIN_VERSIONS)
    assert pool.servers["rare"].state == "routable"


def test_the_last_server_is_never_retired() -> None:
    pool = pool_of("flapping", "steady")
    pool.lose("steady", "gone")
    for _ in range(3 * MAX_LOSSES):
        assert pool.lose("flapping", "gone", may_return=True)
        pool.join("flapping")
        pool.admit("flapping", 0)
    assert pool.has_hope()


def test_a_server_that_is_slower_than_the_others_by_a_factor_is_named_once_until_it_has_recovered() -> None:
    pool = pool_of("slow", "a", "b")

    def answers(num: int, slow_s: float) -> list[str]:
        messages = [pool.note_answer(url, 1.0, 100) for _ in range(num) for url in ("a", "b")]
        messages += [pool.note_answer("slow", slow_s, 100) for _ in range(num)]
        return [message for message in messages if message is not None]

    assert not answers(SLOW_ANSWERS, 1.0)
    (message,) = answers(4 * SLOW_ANSWERS, 4.0)
    assert message.startswith("The server at slow takes 3")  # something above 30 ms
    assert "the others 10 ms" in message
    assert not answers(10 * SLOW_ANSWERS, 1.0)
    assert len(answers(4 * SLOW_ANSWERS, 5.0)) == 1


def test_one_server_alone_is_not_slow() -> None:
    pool = pool_of("a")
    assert not any(pool.note_answer("a", 10.0 * number, 1) for number in range(3 * SLOW_ANSWERS))
