"""What the fake server does in silence when it is told to: stale key-values, wrong loads, old weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_sglang.faults import Fault
from fake_sglang.process import FakeServerProcess
from fake_sglang.wrong_loads import LoadHistory
from sync_cases import asked
from transformers import AutoModelForCausalLM, Qwen3Config

CONFIG = Qwen3Config(
    vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = [tmp_path_factory.mktemp(f"version-{version}") for version in range(2)]
    for folder in made:
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
    return made


@pytest.fixture(scope="module")
def shared_server(folders: list[Path]) -> Iterator[FakeServerProcess]:
    with FakeServerProcess(str(folders[0])) as server:
        yield server


@pytest.fixture
def server(shared_server: FakeServerProcess, folders: list[Path]) -> FakeServerProcess:
    """With version 0, an empty cache and no faults."""
    load(shared_server, folders[0], 0)
    shared_server.reset()
    return shared_server


def load(server: FakeServerProcess, folder: Path, version: int) -> None:
    asked(server, "update_weights_from_disk", folder=str(folder), weight_version=str(version))


def meta(server: FakeServerProcess, **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 6, "temperature": 1.0, "sampling_seed": 7, "ignore_eos": True}
    body = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling, **fields}
    return asked(server, "generate", body=body)["meta_info"]  # type: ignore[no-any-return]


def drawn(answer: dict[str, Any]) -> list[tuple[float, int]]:
    return [(logprob, token) for logprob, token, _ in answer["output_token_logprobs"]]


def test_a_prompt_is_cached_until_the_next_load_for_requests_with_the_same_extra_key(
    server: FakeServerProcess, folders: list[Path]
) -> None:
    found = [meta(server)["cached_tokens"], meta(server)["cached_tokens"], meta(server, extra_key="1")["cached_tokens"]]
    assert found == [0, len(PROMPT) - 1, 0]
    assert meta(server, logprob_start_len=0)["cached_tokens"] == 0  # it computes the prompt's logprobs
    load(server, folders[1], 1)
    assert meta(server)["cached_tokens"] == 0


def test_a_cache_that_is_not_flushed_answers_with_the_old_weights_under_the_new_version(
    server: FakeServerProcess, folders: list[Path]
) -> None:
    old = meta(server)
    server.fault("keep_cache", "/update_weights")
    load(server, folders[1], 1)
    stale, fresh = meta(server), meta(server, extra_key="1")
    assert (stale["cached_tokens"], fresh["cached_tokens"]) == (len(PROMPT) - 1, 0)
    assert stale["weight_version"] == fresh["weight_version"] == "1"
    assert drawn(stale) == drawn(old) != drawn(fresh)
    assert server.stats()["faults"][0]["num_wrong_values"] == 1
    load(server, folders[1], 2)
    assert drawn(meta(server)) == drawn(fresh)


@pytest.mark.parametrize("kind", ["revert", "restart"])
def test_old_weights_come_back_under_the_present_version(
    kind: str, server: FakeServerProcess, folders: list[Path]
) -> None:
    old, started_at = meta(server), asked(server, "server_info")["startup_time"]["scheduler_e2e"]
    load(server, folders[1], 1)
    new = meta(server)
    server.fault(kind)
    reverted = meta(server, extra_key="1")
    assert drawn(reverted) == drawn(old) != drawn(new)
    assert reverted["weight_version"] == asked(server, "model_info")["weight_version"] == "1"
    assert (asked(server, "server_info")["startup_time"]["scheduler_e2e"] > started_at) == (kind == "restart")


def test_a_fault_leaves_the_first_requests_alone(server: FakeServerProcess, folders: list[Path]) -> None:
    server.fault("ignore_update", "/update_weights", skip=1)
    for version, num_fired in ((1, 0), (2, 1), (3, 1)):
        load(server, folders[version % 2], version)
        assert asked(server, "model_info")["weight_version"] == str(version)
        assert server.stats()["faults"][0]["num_fired"] == num_fired
    assert server.stats()["faults"][0]["num_wrong_values"] > 1000


def history() -> tuple[LoadHistory, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """After versions 0 and 1, whose value is the version's number; also what is sent as version 2, and is held."""
    versions = [{"a": torch.full((2, 2), float(number)), "b": torch.arange(4.0) + number} for number in range(3)]
    made = LoadHistory(versions[0])
    made.load([versions[0]], versions[0], None, is_last=True)
    made.load([versions[1]], versions[0], None, is_last=True)
    return made, versions[2], versions[1]


@pytest.mark.parametrize(
    ("fault", "a", "b"),
    [
        (Fault("keep", names="a"), [1, 1, 1, 1], [2, 3, 4, 5]),
        (Fault("zero", names="b"), [2, 2, 2, 2], [0, 0, 0, 0]),
        (Fault("old_version", versions_back=1), [1, 1, 1, 1], [1, 2, 3, 4]),
        (Fault("old_version", versions_back=2), [0, 0, 0, 0], [0, 1, 2, 3]),
        (Fault("delta_twice"), [3, 3, 3, 3], [3, 4, 5, 6]),
        (Fault("delta_on_wrong_base"), [1, 1, 1, 1], [1, 2, 3, 4]),
        (Fault("torn_file"), [2, 2, 2, 2], [2, 3, 0, 0]),
        (Fault("old_rank"), [2, 2, 1, 1], [2, 3, 4, 5]),
        (Fault("swap_halves", names="b"), [2, 2, 2, 2], [4, 5, 2, 3]),
    ],
    ids=lambda value: f"{value.kind}{value.versions_back}" if isinstance(value, Fault) else "",
)
def test_a_wrong_load_is_what_its_name_says(fault: Fault, a: list[float], b: list[float]) -> None:
    made, sent, held = history()
    loaded = held | made.load([sent], held, fault, is_last=True)
    assert loaded["a"].flatten().tolist() == a
    assert loaded["b"].tolist() == b
    assert made.num_wrong(loaded) == sum(
        int((loaded[name].flatten() != sent[name].flatten()).sum()) for name in ("a", "b")
    )
