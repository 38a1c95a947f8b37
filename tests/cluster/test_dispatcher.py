"""The dispatcher: no row twice or never, runs that share prefixes, balance, and what happens to rows of lost replicas."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch_cli.cluster.dispatcher import Dispatcher, work_of
from contbatch_cli.core.request import GREEDY, Request, RequestId


def row(index: int, tokens: int = 10, prompt: list[int] | None = None) -> Request:
    return Request.from_prompt(RequestId(index), prompt or [index], replace(GREEDY, max_tokens=tokens))


def dispatcher(order: str, replicas: int, seats: int, max_attempts: int = 3) -> Dispatcher:
    made = Dispatcher(order, 4, max_attempts)
    for number in range(replicas):
        made.join(number, seats)
    return made


def ids(requests: list[Request]) -> list[int]:
    return [request.request_id.row for request in requests]


@given(st.data())
def test_every_row_ends_exactly_once_whatever_is_lost(data: st.DataObject) -> None:
    order = data.draw(st.sampled_from(["input", "longest_first", "prefix"]))
    replicas = data.draw(st.integers(1, 4))
    made = dispatcher(order, replicas, data.draw(st.integers(1, 9)), max_attempts=data.draw(st.integers(1, 3)))
    rng = random.Random(data.draw(st.integers(0, 2**16)))
    waiting = [row(index, rng.choice([1, 5, 200]), [rng.randrange(3), index]) for index in range(data.draw(st.integers(0, 60)))]
    total, ended, next_replica = len(waiting), Counter[int](), replicas
    while waiting or made.num_undispatched or made.num_sent:
        for _ in range(min(made.num_wanted, len(waiting))):
            made.add(waiting.pop())
        made.assign(replica for replica in made.replicas if rng.random() < 0.8)
        made.check()
        for replica in made.replicas:
            sent = list(made._lanes[replica].sent)
            for request_id in rng.sample(sent, rng.randint(0, len(sent))):
                assert made.finish(replica, request_id) is not None
                assert made.finish(replica, request_id) is None
                ended[request_id.row] += 1
        if rng.random() < 0.1:
            ended.update(ids(made.leave(rng.choice(made.replicas))))
            made.join(next_replica, rng.randint(1, 9))
            next_replica += 1
        made.check()
    assert ended == Counter(range(total))


def test_no_replica_gets_more_than_its_seats_and_a_few_to_spare() -> None:
    made = dispatcher("input", 2, 8)
    for index in range(100):
        made.add(row(index))
    assigned = made.assign([0, 1])
    assert [len(requests) for _, requests in assigned] == [10, 10]
    assert made.assign([0, 1]) == []
    assert made.num_undispatched == 80


def test_a_job_with_fewer_rows_than_seats_is_spread() -> None:
    made = dispatcher("input", 4, 64)
    for index in range(20):
        made.add(row(index))
    assert [len(requests) for _, requests in made.assign(range(4))] == [5, 5, 5, 5]


def test_rows_are_kept_for_replicas_that_still_start() -> None:
    made = dispatcher("input", 1, 64)
    made.num_starting = 3
    for index in range(20):
        made.add(row(index))
    assert len(made.assign([0])[0].requests) == 5
    made.num_starting = 0
    assert len(made.assign([0])[0].requests) == 15


def test_rows_that_share_a_prefix_go_to_one_replica() -> None:
    """64 documents of 8 blocks with 16 questions each, in lexicographic order, over 4 replicas of 4 seats."""
    made = dispatcher("prefix", 4, 4)
    rng = random.Random(7)
    rows = [row(16 * d + q, rng.randint(8, 12), [d] * 32 + [q]) for d in range(64) for q in range(16)]
    for one in rows:
        made.add(one)
    places: dict[int, set[int]] = {}
    while made.num_undispatched or made.num_sent:
        made.assign(range(4))
        for replica in range(4):
            sent = list(made._lanes[replica].sent)
            for request_id in rng.sample(sent, min(len(sent), rng.randint(0, 3))):
                places.setdefault(request_id.row // 16, set()).add(replica)
                made.finish(replica, request_id)
    computed = sum(map(len, places.values()))
    assert computed <= 64 * 1.35, f"64 prefixes were computed {computed} times"


def test_a_run_is_cut_where_neighbours_share_least() -> None:
    made = dispatcher("prefix", 1, 1)
    rows = [row(index, 10, [1] * 8 + [index // 5] * 8 + [index]) for index in range(40)]
    for one in rows:
        made.add(one)
    run = made._cut_run()
    assert len(run) % 5 == 0 and 0 < len(run) < 40
    assert sorted(ids(run)) == list(range(len(run)))


def test_within_a_run_the_longest_rows_come_first() -> None:
    made = dispatcher("prefix", 1, 1)
    for index in range(40):
        made.add(row(index, 10 + index % 7, [1] * 8 + [index]))
    works = [work_of(request) for request in made._cut_run()]
    assert works == sorted(works, reverse=True) and len(set(works)) > 1


def test_a_replica_without_work_takes_over_what_another_was_not_given() -> None:
    made = dispatcher("prefix", 1, 1)
    for index in range(12):
        made.add(row(index))
    made._lanes[0].planned.extend(made._from_shelf() for _ in range(12))
    made.join(1, 1)
    assert len(made.assign([1])[0].requests) == 1
    assert sorted(ids([*made._lanes[1].sent.values(), *made._lanes[1].planned])) == [6, 7, 8, 9, 10, 11]
    assert ids(list(made._lanes[0].planned)) == [0, 1, 2, 3, 4, 5]


def test_a_row_on_its_last_attempt_shares_its_replica_with_no_other_such_row() -> None:
    """One row kills what runs it; with three attempts it is given up, and none of the 40 innocent ones."""
    made = dispatcher("input", 3, 8)
    for index in range(41):
        made.add(row(index))
    given_up: list[int] = []
    done: list[int] = []
    next_replica = 3
    while made.num_undispatched or made.num_sent:
        made.assign(made.replicas)
        for replica in made.replicas:
            if RequestId(17) in made._lanes[replica].sent:
                given_up += ids(made.leave(replica))
                made.join(next_replica, 8)
                next_replica += 1
        for replica in made.replicas:
            for request_id in list(made._lanes[replica].sent):
                done.append(request_id.row)
                made.finish(replica, request_id)
    assert given_up == [17]
    assert sorted(done) == [index for index in range(41) if index != 17]


def test_planned_rows_of_a_lost_replica_count_no_attempt() -> None:
    made = dispatcher("prefix", 2, 1, max_attempts=1)
    for index in range(20):
        made.add(row(index))
    made.assign([0, 1])
    assert len(made.leave(0)) == 1
    assert made.num_undispatched == 18


@pytest.mark.parametrize("order", ["input", "prefix"])
def test_rows_are_asked_for_a_few_at_a_time(order: str) -> None:
    made = dispatcher(order, 2, 8)
    first = made.num_wanted
    assert first == (20 if order == "input" else 4096)
    for index in range(first):
        made.add(row(index))
    assert made.num_wanted == 0
