"""What every rollout engine owes its callers: checks that take an EngineCase; each engine's test runs all of them."""

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.errors import EngineError, WeightSyncError
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket, bucketed

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [1, 2, 3], [9], list(range(20, 50)), [30, 31], [12, 11, 10, 9]]
STOPS = tuple(range(8))  # of a vocabulary of 61: a random policy soon draws one
BUCKET_BYTES = 20_000  # several buckets for the models of the tests
MAX_SYNC_ATTEMPTS = 20  # a test that does not get to run misses the midst of short completions


@dataclass
class EngineCase:
    """A started engine without weights, and the models whose weights it is given: version v is models[v]."""

    engine: RolloutEngine
    models: list[PreTrainedModel]  # at least 3, of one config
    has_model: bool = True  # its logprobs can be recomputed with a model
    is_exact: bool = True  # the same wave gives the same floats; over HTTP who decodes beside whom is chance

    def load(self, version: int) -> None:
        self.engine.load_weights(self.buckets(version), weight_version=version)

    def buckets(self, version: int) -> Iterator[Bucket]:
        return bucketed(self.models[version % len(self.models)].named_parameters(), BUCKET_BYTES)

    async def generate(self, prompt: list[int], sampling: Sampling, n: int = 1) -> list[Completion]:
        return await self.engine.generate(prompt, sampling, session="test", n=n)

    async def depth(self) -> int:
        depths = self.engine.queue_depths()  # type: ignore[attr-defined]
        return int(depths["running"] + depths["waiting"])


def run(coroutine: Coroutine[Any, Any, Any], timeout_s: float = 600.0) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, timeout_s)

    return asyncio.run(bounded())


def recomputed_logprobs(
    model: PreTrainedModel, prompt: list[int], token_ids: list[int], sampling: Sampling, supports: Any = None
) -> Tensor:
    """Of each new token, by a plain forward over the whole sequence; within the supports if there are any."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1].float()
    logits[: sampling.min_new_tokens, list(sampling.stop_token_ids)] = float("-inf")
    for row, support in zip(logits, supports or (), strict=False):
        row[[token for token in range(len(row)) if token not in support]] = float("-inf")
    logprobs = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
    return logprobs[torch.arange(len(token_ids)), token_ids]


def assert_well_formed(completion: Completion, sampling: Sampling) -> None:
    ids = completion.token_ids
    assert len(ids) == len(completion.logprobs) == len(completion.weight_versions)
    assert 1 <= len(ids) <= sampling.max_new_tokens
    assert completion.weight_versions == sorted(completion.weight_versions)
    hits = [place for place, token in enumerate(ids) if token in sampling.stop_token_ids]
    if completion.finish_reason == "stop":
        assert hits == [len(ids) - 1]
    else:
        assert completion.finish_reason == "length"
        assert hits == []
        assert len(ids) == sampling.max_new_tokens


def a_request_before_the_first_load_is_an_error(case: EngineCase) -> None:
    with pytest.raises(EngineError, match="weights"):
        run(case.generate([1], Sampling()))


def a_completion_ends_with_its_first_stop_token_or_at_max_new_tokens(case: EngineCase) -> None:
    case.load(0)
    sampling = Sampling(max_new_tokens=12, stop_token_ids=STOPS, seed=3)

    async def scenario() -> list[list[Completion]]:
        return await asyncio.gather(*(case.generate(prompt, sampling, n=4) for prompt in PROMPTS))

    completions = [completion for group in run(scenario()) for completion in group]
    assert len(completions) == 4 * len(PROMPTS)
    for completion in completions:
        assert_well_formed(completion, sampling)
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}


def min_new_tokens_keeps_stop_tokens_away(case: EngineCase) -> None:
    case.load(0)
    sampling = Sampling(max_new_tokens=20, min_new_tokens=20, stop_token_ids=STOPS, seed=1)
    for completion in run(case.generate([1, 2], sampling, n=5)):
        assert len(completion.token_ids) == 20
        assert completion.finish_reason == "length"
        assert not set(completion.token_ids) & set(STOPS)


def the_same_seed_gives_the_same_tokens_whatever_the_batch(case: EngineCase) -> None:
    case.load(0)
    sampling = Sampling(max_new_tokens=15, seed=77, temperature=0.8)
    alone = run(case.generate([1, 2, 3], sampling))[0]

    async def scenario() -> list[list[Completion]]:
        others = [case.generate(p, Sampling(max_new_tokens=5 + i, seed=i), n=2) for i, p in enumerate(PROMPTS)]
        return await asyncio.gather(*others, case.generate([1, 2, 3], sampling), *(case.generate([4], sampling),))

    together = run(scenario())[-2][0]
    assert together.token_ids == alone.token_ids
    assert together.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def completions_of_one_request_differ_and_the_first_has_its_own_seed(case: EngineCase) -> None:
    case.load(0)
    sampling = Sampling(max_new_tokens=15, seed=5)
    several = run(case.generate([1, 2, 3], sampling, n=4))
    assert several[0].token_ids == run(case.generate([1, 2, 3], sampling))[0].token_ids
    assert len({tuple(completion.token_ids) for completion in several}) == 4
    again = run(case.generate([1, 2, 3], sampling, n=4))
    assert again == several if case.is_exact else [c.token_ids for c in again] == [c.token_ids for c in several]


def a_group_has_the_completions_of_single_requests(case: EngineCase) -> None:
    case.load(0)
    samplings = [Sampling(max_new_tokens=6 + seed, seed=seed) for seed in range(4)]
    alone = [run(case.generate([1, 2, 3], sampling))[0] for sampling in samplings]
    started = [None, Completion(alone[1].token_ids[:3], alone[1].logprobs[:3], [0] * 3, "abort"), None, None]

    async def scenario() -> list[Completion]:
        with pytest.raises(ValueError, match="empty"):
            await asyncio.gather(*case.engine.generate_group([], samplings[:1], session="test"))
        generating = case.engine.generate_group([1, 2, 3], samplings, session="test", started=started)
        generating[2].cancel()
        return [await one for index, one in enumerate(generating) if index != 2]

    first, continued, last = run(scenario())
    assert continued.token_ids[:3] == alone[1].token_ids[:3]
    pairs = [(first, alone[0]), (last, alone[3]), *([(continued, alone[1])] if case.is_exact else [])]
    for one, expected in pairs:
        assert one.token_ids == expected.token_ids
        assert one.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def temperature_zero_does_not_depend_on_the_seed(case: EngineCase) -> None:
    case.load(0)
    one, other = (run(case.generate([1, 2], Sampling(temperature=0, max_new_tokens=8, seed=s)))[0] for s in (1, 2))
    assert one.token_ids == other.token_ids


def a_prompt_that_cannot_be_served_is_refused_at_once(case: EngineCase) -> None:
    case.load(0)
    vocab_size, room = case.models[0].config.vocab_size, case.models[0].config.max_position_embeddings
    for prompt in ([], [vocab_size], [-1], [1] * (room - 5)):
        with pytest.raises(ValueError, match=r"empty|vocabulary|context"):
            run(case.generate(prompt, Sampling(max_new_tokens=10)))
    assert len(run(case.generate([1] * (room - 10), Sampling(max_new_tokens=10)))[0].token_ids) == 10


def support_sets(completion: Completion, vocab_size: int) -> list[set[int]]:
    """Of each token, decoded by hand."""
    sets: list[set[int]] = []
    support: set[int] = set()
    number, shift, last = 0, 0, -1
    for byte in completion.columns["supports"]:
        number |= (byte & 127) << shift
        shift += 7
        if byte >= 128:
            continue
        if number < 2:
            token = completion.token_ids[len(sets)]
            sets.append(set(range(vocab_size)) if number else support | {token})
            support, last = set(), -1
        else:
            last += number - 1
            support.add(last)
        number, shift = 0, 0
    return sets


def a_truncated_draw_has_its_support(case: EngineCase) -> None:
    if not case.has_model:
        return
    case.load(0)
    vocab_size = case.models[0].config.vocab_size
    for sampling in (
        Sampling(max_new_tokens=20, seed=4, top_k=3),
        Sampling(max_new_tokens=20, seed=5, temperature=1.5, top_p=0.9, top_k=20),
        Sampling(max_new_tokens=20, seed=6, top_p=0.3, min_new_tokens=20, stop_token_ids=STOPS),
    ):
        (completion,) = run(case.generate([5, 6], sampling))
        supports = support_sets(completion, vocab_size)
        assert len(supports) == len(completion.token_ids)
        with torch.no_grad():
            logits = case.models[0](torch.tensor([[5, 6, *completion.token_ids]])).logits[0, 1:-1].float()
        logits[: sampling.min_new_tokens, list(sampling.stop_token_ids)] = float("-inf")
        for probabilities, support in zip((logits / sampling.temperature).softmax(-1), supports, strict=True):
            left_out = [token for token in range(vocab_size) if token not in support]
            kept = probabilities[list(support)]
            assert not left_out or kept.min() >= probabilities[left_out].max()  # the likeliest
            assert len(support) == 3 or sampling.top_k != 3
            assert len(support) <= 20 or sampling.top_k != 20
            if sampling.top_k == -1 and sampling.top_p < 1:
                assert kept.sum() >= sampling.top_p > kept.sum() - kept.min()
    assert "supports" not in run(case.generate([5, 6], Sampling(max_new_tokens=2)))[0].columns


def logprobs_are_those_of_a_plain_forward_after_temperature_within_the_support(case: EngineCase) -> None:
    if not case.has_model:
        return
    case.load(0)
    samplings = [
        Sampling(max_new_tokens=9, seed=1),
        Sampling(max_new_tokens=12, seed=2, temperature=0.5),
        Sampling(max_new_tokens=7, seed=3, temperature=0),
        Sampling(max_new_tokens=15, seed=4, top_k=3),
        Sampling(max_new_tokens=6, seed=5, temperature=1.5, top_p=0.5),
        Sampling(max_new_tokens=30, seed=6, min_new_tokens=4, stop_token_ids=STOPS, temperature=0.7),
        Sampling(max_new_tokens=30, seed=7, min_new_tokens=2, stop_token_ids=(3,)),
    ]

    async def scenario() -> list[list[Completion]]:
        requests = zip(PROMPTS, samplings, strict=True)
        return await asyncio.gather(*(case.generate(prompt, sampling, n=2) for prompt, sampling in requests))

    for prompt, sampling, group in zip(PROMPTS, samplings, run(scenario()), strict=True):
        for completion in group:
            supports = support_sets(completion, 61) if sampling.is_truncated else None
            expected = recomputed_logprobs(case.models[0], prompt, completion.token_ids, sampling, supports)
            assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def scores_are_the_logprobs_of_a_plain_forward_under_the_present_weights(case: EngineCase) -> None:
    score = getattr(case.engine, "score", None)
    if not case.has_model or score is None:
        return
    case.load(0)
    running = [Sampling(max_new_tokens=60, seed=seed) for seed in range(3)]

    async def scenario() -> list[dict[str, list[list[float]]]]:
        tasks = [asyncio.create_task(case.generate([1, 2], sampling)) for sampling in running]
        await asyncio.sleep(0.01)
        scores = [await asyncio.to_thread(score, PROMPTS[1:3])]
        await asyncio.to_thread(case.load, 1)
        scores.append(await asyncio.to_thread(score, PROMPTS[4:5]))
        assert [len((await task)[0].token_ids) for task in tasks] == [60] * 3
        return scores

    for model, prompts, scores in zip((0, 1), (PROMPTS[1:3], PROMPTS[4:5]), run(scenario()), strict=True):
        assert scores
        for rows in scores.values():
            for prompt, row in zip(prompts, rows, strict=True):
                expected = recomputed_logprobs(case.models[model], prompt[:1], prompt[1:], Sampling())
                assert row == pytest.approx([0.0, *expected.tolist()], abs=1e-5)


def top_k_of_one_is_the_greedy_completion(case: EngineCase) -> None:
    if not case.has_model:
        return
    case.load(0)
    greedy = run(case.generate([5, 6], Sampling(temperature=0, max_new_tokens=10)))[0]
    narrow = run(case.generate([5, 6], Sampling(top_k=1, max_new_tokens=10, seed=9)))[0]
    nucleus = run(case.generate([5, 6], Sampling(top_p=1e-6, max_new_tokens=10, seed=9)))[0]
    assert greedy.token_ids == narrow.token_ids == nucleus.token_ids
    assert narrow.logprobs == nucleus.logprobs == [0.0] * 10  # nothing else could be drawn


def short_completions_leave_before_a_long_one_and_free_their_slots(case: EngineCase) -> None:
    case.load(0)
    finished: list[int] = []

    async def one(index: int, length: int) -> None:
        await case.generate([1, 2], Sampling(max_new_tokens=length, seed=index))
        finished.append(index)

    async def scenario() -> None:
        await asyncio.gather(one(0, 150), *(one(index, 3) for index in range(1, 25)))

    run(scenario())
    assert finished[-1] == 0
    assert sorted(finished) == list(range(25))


def a_paused_engine_waits_and_any_number_of_pauses_ends_with_one_resume(case: EngineCase) -> None:
    case.load(0)

    async def scenario() -> None:
        running = asyncio.create_task(case.generate([1], Sampling(max_new_tokens=100), n=2))
        await asyncio.sleep(0)
        await case.engine.pause()
        await case.engine.pause()
        queued = asyncio.create_task(case.generate([2], Sampling(max_new_tokens=2)))
        await asyncio.sleep(0.05)
        assert not queued.done()
        await case.engine.resume()
        assert len((await queued)[0].token_ids) == 2
        assert [len(completion.token_ids) for completion in await running] == [100, 100]

    run(scenario())


def tokens_carry_the_version_that_sampled_them(case: EngineCase) -> None:
    for version in (0, 1):
        case.load(version)
        assert case.engine.weight_version == version
        completion = run(case.generate([1, 2], Sampling(max_new_tokens=5)))[0]
        assert completion.weight_versions == [version] * 5


def a_load_leaves_a_paused_engine_paused(case: EngineCase) -> None:
    case.load(0)

    async def scenario() -> None:
        await case.engine.pause()
        task = asyncio.create_task(case.generate([1], Sampling(max_new_tokens=3)))
        await asyncio.to_thread(case.load, 1)
        await asyncio.sleep(0.05)
        assert not task.done()
        await case.engine.resume()
        assert (await task)[0].weight_versions == [1, 1, 1]

    run(scenario())


def after_a_sync_during_a_generation_each_token_is_that_of_its_version(case: EngineCase) -> None:
    version = 0
    case.load(version)
    sampling = Sampling(max_new_tokens=80, seed=8, temperature=0.9)

    async def scenario() -> list[list[Completion]]:
        nonlocal version
        tasks = [asyncio.create_task(case.generate(p, replace(sampling, seed=i), n=2)) for i, p in enumerate(PROMPTS)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.005)
            version += 1
            await asyncio.to_thread(case.load, version)
        return [await task for task in tasks]

    for _ in range(MAX_SYNC_ATTEMPTS):
        if num_of_several_versions(case, run(scenario()), sampling) > 0:
            return
    raise AssertionError("no sync came amid a completion")


def num_of_several_versions(case: EngineCase, groups: list[list[Completion]], sampling: Sampling) -> int:
    """So many completions a sync came amid of; all were checked, token by token."""
    num_mixed = 0
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            assert_well_formed(completion, sampling)
            versions = torch.tensor(completion.weight_versions)
            num_mixed += len(set(completion.weight_versions)) > 1
            if not case.has_model:
                continue
            logprobs = torch.tensor(completion.logprobs)
            for index, model in enumerate(case.models):
                expected = recomputed_logprobs(model, prompt, completion.token_ids, sampling)
                mine = versions % len(case.models) == index
                torch.testing.assert_close(logprobs[mine], expected[mine], atol=1e-5, rtol=0)
    return num_mixed


def a_bad_load_leaves_the_old_weights_serving(case: EngineCase) -> None:
    case.load(0)
    sampling = Sampling(temperature=0, max_new_tokens=8)
    before = run(case.generate([1, 2, 3], sampling))

    def assert_serves_as_before() -> None:
        now = run(case.generate([1, 2, 3], sampling))
        if case.is_exact:
            assert now == before
        assert (now[0].token_ids, now[0].weight_versions) == (before[0].token_ids, before[0].weight_versions)
        assert now[0].logprobs == pytest.approx(before[0].logprobs, abs=1e-5)

    good = {name: tensor.detach().clone() for name, tensor in case.models[1].named_parameters()}
    first, *_, last = good
    bad = {
        "unknown name": {**good, "model.nobody.weight": torch.zeros(2)},
        "missing name": {name: tensor for name, tensor in good.items() if name != last},
        "wrong shape": {**good, last: good[last].repeat(2, *[1] * (good[last].dim() - 1))},
        "not finite": {**good, last: torch.full_like(good[last], float("nan"))},
    }
    for parameters in bad.values():
        with pytest.raises(WeightSyncError):
            case.engine.load_weights(bucketed(parameters.items(), BUCKET_BYTES), weight_version=1)
        assert case.engine.weight_version == 0
        assert_serves_as_before()

    def broken() -> Iterator[Bucket]:
        yield Bucket({first: good[first]})
        raise ConnectionError("the trainer is gone")

    with pytest.raises(ConnectionError):
        case.engine.load_weights(broken(), weight_version=1)
    assert_serves_as_before()
    case.load(2)
    assert run(case.generate([1, 2, 3], sampling))[0].weight_versions == [2] * 8


def cancelled_requests_leave_no_slot_behind(case: EngineCase) -> None:
    case.load(0)

    async def scenario(is_paused: bool) -> None:
        if is_paused:
            await case.engine.pause()
        tasks = [
            asyncio.create_task(case.generate(PROMPTS[index % 7], Sampling(max_new_tokens=150, seed=index)))
            for index in range(20)
        ]
        survivor = asyncio.create_task(case.generate([3], Sampling(max_new_tokens=30, seed=1)))
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if is_paused:
            await case.engine.resume()
        assert len((await survivor)[0].token_ids) == 30
        while await case.depth() > 0:
            await asyncio.sleep(0.005)
        assert len((await case.generate([1], Sampling(max_new_tokens=3), n=6))[5].token_ids) == 3

    run(scenario(is_paused=False))
    run(scenario(is_paused=True))


def closing_ends_requests_with_an_error_and_can_be_repeated(case: EngineCase) -> None:
    case.load(0)

    async def scenario() -> None:
        await case.engine.pause()
        task = asyncio.create_task(case.generate([1], Sampling(max_new_tokens=100)))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(case.engine.close)
        with pytest.raises(EngineError, match="closed"):
            await task
        case.engine.close()
        with pytest.raises(EngineError, match="closed"):
            await case.generate([1], Sampling())

    run(scenario())


def a_completion_that_was_started_continues(case: EngineCase) -> None:
    case.load(0)
    sampling = Sampling(max_new_tokens=12, seed=3)

    async def continued(begun: Completion) -> Completion:
        engine: Any = case.engine
        return (await engine.generate(PROMPTS[0], sampling, session="test", started=begun))[0]  # type: ignore[no-any-return]

    (whole,) = run(case.generate(PROMPTS[0], sampling))
    begun = Completion(whole.token_ids[:5], whole.logprobs[:5], whole.weight_versions[:5], "abort")
    if case.is_exact:
        assert run(continued(begun)).token_ids == whole.token_ids
    case.load(1)
    longer = run(continued(begun))
    assert longer.token_ids[:5] == begun.token_ids
    assert longer.logprobs[:5] == begun.logprobs
    assert longer.weight_versions == [0] * 5 + [1] * 7
    assert longer.finish_reason == "length"


# Every function of this file that takes a case alone.
CONTRACT = [check for check in list(vars().values()) if [*getattr(check, "__annotations__", ())] == ["case", "return"]]
