"""The rank that gets each parameter, and what travels, against counts made here, element by element."""

import itertools
import math
from collections import Counter

import pytest

from lightrl.strategies.ranks.planned_gather import GatherPlan, Layout, make_plan

BUCKET = 4096


def rows_over(name: str, shape: tuple[int, ...], ranks: list[int], *, copies: int = 1) -> Layout:
    """As FSDP2 shards: equal parts of the first dimension, the last smaller or empty; `copies` of each."""
    num = len(ranks) // copies
    size = math.ceil(shape[0] / num)
    boxes = {}
    for place, rank in enumerate(ranks):
        start = min(place % num * size, shape[0])
        end = min(start + size, shape[0])
        boxes[rank] = ((start, *(0 for _ in shape[1:])), (end - start, *shape[1:]))
    return Layout(name, shape, 4, boxes)


def columns_over(name: str, shape: tuple[int, int], ranks: list[int]) -> Layout:
    size = shape[1] // len(ranks)
    boxes = {rank: ((0, place * size), (shape[0], size)) for place, rank in enumerate(ranks)}
    return Layout(name, shape, 4, boxes)


def layer(index: int, ranks: list[int]) -> list[Layout]:
    name = f"model.layers.{index}"
    return [
        rows_over(f"{name}.self_attn.q_proj.weight", (32, 16), ranks),
        rows_over(f"{name}.self_attn.k_proj.weight", (16, 16), ranks),
        columns_over(f"{name}.self_attn.o_proj.weight", (16, 32), ranks),
        rows_over(f"{name}.mlp.up_proj.weight", (48, 16), ranks),
        rows_over(f"{name}.mlp.gate_proj.weight", (48, 16), ranks),
        Layout(f"{name}.input_layernorm.weight", (16,), 4, dict.fromkeys(ranks, ((0,), (16,)))),
    ]


def model(stages: list[list[int]], num_layers: int = 6) -> list[Layout]:
    """Layers over pipeline stages, each stage's over its ranks."""
    layouts = [rows_over("model.embed_tokens.weight", (101, 16), stages[0])]
    for index in range(num_layers):
        layouts += layer(index, stages[index * len(stages) // num_layers])
    return [*layouts, rows_over("model.norm.weight", (16,), stages[-1])]


CASES = {
    "fsdp": model([[0, 1, 2, 3]]),
    "pipeline": model([[0, 1], [2, 3]]),
    "replicas": [rows_over(f"layers.{index}.mlp.w", (10, 4), [0, 1, 2, 3], copies=2) for index in range(8)],
    "uneven": [rows_over(f"layers.{index}.mlp.w", (3, 5), [0, 1, 2, 3]) for index in range(8)],
}


def planned(layouts: list[Layout], ranks: list[int], bucket_bytes: int = BUCKET) -> GatherPlan:
    return make_plan(
        layouts, {layout.name: [layout.name] for layout in layouts}, ranks=ranks, bucket_bytes=bucket_bytes
    )


def elements(box: tuple[tuple[int, ...], tuple[int, ...]]) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, start + size) for start, size in zip(*box, strict=True))))


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2, 3]], ids=["to rank 0", "to all"])
@pytest.mark.parametrize("name", CASES)
def test_each_element_that_an_owner_lacks_is_sent_once_and_no_other(name, ranks):
    plan = planned(CASES[name], ranks)
    lacking = 0
    for layout in CASES[name]:
        owner = plan.owners[layout.name]
        arrived = Counter(
            element for send in plan.sends[layout.name] for element in elements(send.box) if send.owner == owner
        )
        own = elements(layout.boxes[owner]) if owner in layout.boxes else set()
        everything = set(itertools.product(*map(range, layout.shape)))
        assert arrived == Counter(everything - own)
        assert all(elements(send.box) <= elements(layout.boxes[send.source]) for send in plan.sends[layout.name])
        lacking += 4 * len(everything - own)
    assert sum(send.num_bytes for sends in plan.sends.values() for send in sends) == lacking


@pytest.mark.parametrize("name", CASES)
def test_only_rank_0_receives_when_it_gathers_alone(name):
    plan = planned(CASES[name], [0])
    assert {send.owner for sends in plan.sends.values() for send in sends} == {0}


def test_owners_share_the_bytes_evenly():
    layouts = model([[0, 1, 2, 3]], num_layers=24)
    plan = planned(layouts, [0, 1, 2, 3])
    owned: Counter[int] = Counter()
    for layout in layouts:
        owned[plan.owners[layout.name]] += layout.num_bytes
    assert max(owned.values()) <= 1.1 * owned.total() / 4


def test_no_byte_leaves_its_pipeline_stage():
    plan = planned(CASES["pipeline"], [0, 1, 2, 3])
    pairs = {(send.source, send.owner) for sends in plan.sends.values() for send in sends}
    assert pairs == {(0, 1), (1, 0), (2, 3), (3, 2)}


def test_what_a_server_fuses_has_one_owner():
    plan = planned(CASES["fsdp"], [0, 1, 2, 3])
    for index in range(6):
        for block in ("self_attn", "mlp"):
            assert len({owner for name, owner in plan.owners.items() if f"layers.{index}.{block}." in name}) == 1


def test_copies_take_turns_as_senders():
    plan = planned(CASES["replicas"], [0])
    sent = Counter(send.source for sends in plan.sends.values() for send in sends)
    assert set(sent) == {1, 3}
    assert abs(sent[1] - sent[3]) <= 1


def test_no_rank_gathers_more_than_a_bucket_in_a_round_unless_one_tensor_is_larger():
    layouts = CASES["fsdp"]
    plan = planned(layouts, [0, 1, 2, 3])
    sizes = {layout.name: layout.num_bytes for layout in layouts}
    assert sorted(name for names in plan.rounds for name in names) == sorted(sizes)
    for names in plan.rounds:
        for owner in range(4):
            own = [sizes[name] for name in names if plan.owners[name] == owner]
            assert sum(own) <= BUCKET or len(own) == 1


def test_a_gap_between_the_parts_is_refused():
    broken = Layout("w", (4, 2), 4, {0: ((0, 0), (2, 2)), 1: ((3, 0), (1, 2))})
    with pytest.raises(ValueError, match=r"w .* overlap or leave a gap"):
        planned([broken], [0])
