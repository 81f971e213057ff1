"""LocalEngine: the contract on the fast path and the fallback, and what is its own."""

import asyncio
import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import engine_contract
import pytest
import torch
import transformers
from engine_contract import CONTRACT, EngineCase, recomputed_logprobs, run
from moe_cases import engine_of, moe_model, sampled
from sync_cases import SMALL
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig, PreTrainedModel

from benchmarks.families import FAMILIES, family_spec
from lightrl.engines import Completion
from lightrl.engines.local import decoder as any_decoder
from lightrl.engines.local.decoder import HuggingFaceDecoder, check_not_ending
from lightrl.engines.local.fast import decoder as fast_decoder
from lightrl.engines.local.fast.decoder import LlamaDecoder, find_family
from lightrl.engines.local.local_engine import LocalEngine
from lightrl.engines.local.running_batch import Row, RunningBatch
from lightrl.errors import EngineError, WeightSyncError
from lightrl.experience import Experience
from lightrl.functional import ImportanceWeights
from lightrl.models import new_model
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket, block_fp8

SIZES: dict[str, Any] = {**SMALL, "eos_token_id": 1}
FP8_SIZES = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 64}
FP8_SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def qwen3(**changes: Any) -> PretrainedConfig:
    return transformers.Qwen3Config(**{**SIZES, "head_dim": 16, "tie_word_embeddings": True, **changes})


def gpt2() -> PretrainedConfig:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    return transformers.GPT2Config(vocab_size=61, bos_token_id=0, eos_token_id=1, **sizes)


def llama_with_biases() -> PretrainedConfig:
    biases = {"attention_bias": True, "mlp_bias": True}
    return transformers.LlamaConfig(**SIZES, head_dim=16, **biases, rope_parameters=LLAMA3_ROPE)


def hybrid(family: str, **changes: Any) -> PretrainedConfig:
    sizes = {"vocab_size": 61, "max_position_embeddings": 256, "initializer_range": 0.02}
    return transformers.AutoConfig.for_model(family, **{**FAMILIES["hybrid"][family], **sizes, **changes})


CASES: dict[str, tuple[Callable[[], PretrainedConfig], bool]] = {
    "fast Qwen3": (qwen3, True),
    "fast Llama with biases and llama3 rope": (llama_with_biases, True),
    "fast Qwen3, packed in place": (qwen3, True),
    "fast Llama with biases, packed in place": (llama_with_biases, True),
    "fast Qwen3 without kernels": (qwen3, True),
    "fast Llama with biases without kernels": (llama_with_biases, True),
    "fast Qwen2": (lambda: transformers.Qwen2Config(**SIZES), True),
    "fallback GPT2": (gpt2, True),
    "fallback Mistral with a sliding window": (lambda: transformers.MistralConfig(**SIZES, sliding_window=6), True),
    "fallback forced on Qwen3": (qwen3, False),
}
# Layers of one decoder: linear attention, convolutions, and two kinds of Mamba's scans, beside or within attention.
HYBRIDS = ["qwen3_5_text", "lfm2", "nemotron_h", "jamba", "falcon_h1", "qwen3_next"]
CASES |= {f"fallback {family}": (functools.partial(hybrid, family), True) for family in HYBRIDS}
SLOW = [f"fallback {family}" for family in HYBRIDS]


def make_models(config: PretrainedConfig, count: int = 3) -> list[PreTrainedModel]:
    """Random models with logits of some spread; all parameters differ from their initial values, biases included."""
    generator = torch.Generator().manual_seed(0)
    models = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(count):
            model = new_model(config).eval()
            for parameter in model.parameters():
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
            models.append(model)
    return models


def make_case(config: PretrainedConfig, **arguments: Any) -> EngineCase:
    engine = LocalEngine(threads=1, **{"max_batch": 6, **arguments})
    engine.start(config)
    return EngineCase(engine, make_models(config))


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.extra if name in SLOW else [], id=name) for name in CASES])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineCase]:
    make_config, fast_path = CASES[request.param]
    if request.param.endswith("packed in place"):
        monkeypatch.setattr(fast_decoder, "_LEAST_MOVED", 0)
    if request.param.endswith("without kernels"):
        monkeypatch.setattr(fast_decoder, "kernels", lambda: None)
    config = make_config()
    assert (fast_path and find_family(config) is not None) == request.param.startswith("fast")
    case = make_case(config, fast_path=fast_path)
    yield case
    case.engine.close()


@pytest.fixture
def qwen3_case() -> Iterator[EngineCase]:
    case = make_case(qwen3())
    yield case
    case.engine.close()


WHOLE = ("fast Qwen3", "fallback GPT2")  # the two decoders; the others differ from them in their numbers
OF_NUMBERS = (
    engine_contract.logprobs_are_those_of_a_plain_forward_after_temperature_within_the_support,
    engine_contract.scores_are_the_logprobs_of_a_plain_forward_under_the_present_weights,
    engine_contract.after_a_sync_during_a_generation_each_token_is_that_of_its_version,
)


@pytest.mark.parametrize(
    ("case", "check"),
    [
        pytest.param(
            name,
            check,
            id=f"{name}-{check.__name__}",
            marks=[] if name in WHOLE or (check in OF_NUMBERS and name not in SLOW) else pytest.mark.extra,
        )
        for name in CASES
        for check in CONTRACT
    ],
    indirect=["case"],
)
def test_local_engine_keeps_the_contract(case: EngineCase, check: Callable[[EngineCase], None]) -> None:
    check(case)


def test_engine_weights_equal_the_trainers_and_are_copies(case: EngineCase) -> None:
    case.load(0)
    before = {name: parameter.detach().clone() for name, parameter in case.models[0].named_parameters()}
    for parameter in case.models[0].parameters():
        parameter.data.zero_()
    weights = case.engine.read_weights()
    assert weights.keys() == before.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, before[name]), name


def test_a_default_dtype_that_lightning_sets_during_a_forward_pass_changes_nothing(case: EngineCase) -> None:
    sampling = Sampling(max_new_tokens=20, temperature=0.7, seed=1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        case.load(0)
        (completion,) = run(case.generate([1, 2], sampling))
    finally:
        torch.set_default_dtype(torch.float32)
    expected = recomputed_logprobs(case.models[0], [1, 2], completion.token_ids, sampling)
    assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)


def test_weights_that_are_read_during_a_generation_leave_its_tokens_alone(case: EngineCase) -> None:
    case.load(0)
    sampling = Sampling(max_new_tokens=200, seed=1)

    async def scenario() -> Completion:
        while True:  # until a generation is seen before it ends
            request = asyncio.create_task(case.generate([1], sampling))
            while not request.done() and case.engine.queue_depths()["running"] == 0:
                await asyncio.sleep(0)
            case.engine.read_weights()  # takes a packed weight apart
            was_running = not request.done()
            (completion,) = await request
            if was_running:
                return completion

    completion = run(scenario())
    expected = recomputed_logprobs(case.models[0], [1], completion.token_ids, sampling)
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("fast_path", [True, False], ids=["fast", "fallback"])
def test_a_tied_output_head_may_be_sent_too(fast_path: bool) -> None:
    case = make_case(qwen3(), fast_path=fast_path)
    parameters = dict(case.models[0].named_parameters(remove_duplicate=False))
    assert "lm_head.weight" in parameters
    case.engine.load_weights([Bucket(parameters, is_last=True)], weight_version=0)
    completion = run(case.generate([1, 2], Sampling(max_new_tokens=4)))[0]
    expected = recomputed_logprobs(case.models[0], [1, 2], completion.token_ids, Sampling())
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    case.engine.close()


class OwnGenerate(LocalEngine):
    """Replaces `generate` and knows nothing of groups."""

    asked: tuple[int, ...] = ()  # seeds

    async def generate(self, token_ids: list[int], sampling: Sampling, **request: Any) -> list[Completion]:
        self.asked += (sampling.seed,)
        return await super().generate(token_ids, sampling, **request)


class OwnGroups(OwnGenerate):
    def generate_group(self, *args: Any, **request: Any) -> list[asyncio.Future[Completion]]:
        return super().generate_group(*args, **request)


@pytest.mark.parametrize(("kind", "asked"), [(OwnGenerate, (0, 1, 2)), (OwnGroups, ())])
def test_a_subclass_that_replaces_generate_alone_is_asked_for_every_completion(kind: Any, asked: Any) -> None:
    async def scenario() -> list[Completion]:
        samplings = [Sampling(max_new_tokens=2, seed=seed) for seed in range(3)]
        return await asyncio.gather(*engine.generate_group([1], samplings, session="s"))

    with engine_of(*make_models(qwen3(), 1), kind(threads=1)) as engine:
        assert [len(completion.token_ids) for completion in run(scenario())] == [2, 2, 2]
    assert engine.asked == asked


def test_a_parameter_that_arrives_twice_is_refused(qwen3_case: EngineCase) -> None:
    buckets = [*qwen3_case.buckets(0), *qwen3_case.buckets(0)]
    with pytest.raises(WeightSyncError, match="twice"):
        qwen3_case.engine.load_weights(buckets, weight_version=0)


def test_the_global_random_state_and_thread_count_are_left_alone() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    for fast_path in (True, False):
        with engine_of(*make_models(qwen3(), 1), fast_path=fast_path) as engine:
            run(engine.generate([1], Sampling(max_new_tokens=5), session="test"))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_an_error_while_decoding_reaches_all_requests_with_its_cause(
    qwen3_case: EngineCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen3_case.load(0)

    def fail(*inputs: object) -> None:
        raise RuntimeError("no such product is defined")

    monkeypatch.setattr(fast_decoder.LlamaDecoder, "step", fail)

    async def scenario() -> list[Any]:
        requests = [qwen3_case.generate([1], Sampling(max_new_tokens=5)) for _ in range(3)]
        return await asyncio.gather(*requests, return_exceptions=True)

    for error in run(scenario()):
        assert isinstance(error, EngineError)
        assert isinstance(error.__cause__, RuntimeError)
    with pytest.raises(EngineError, match="decode thread failed"):
        run(qwen3_case.generate([1], Sampling()))
    with pytest.raises(EngineError, match="decode thread failed"):
        qwen3_case.load(1)


@pytest.mark.parametrize("case", WHOLE, indirect=True)
def test_closing_ends_a_prefill_before_its_next_layer(case: EngineCase, monkeypatch: pytest.MonkeyPatch) -> None:
    case.load(0)
    has_begun = threading.Event()
    layers: list[threading.Event] = []

    def check(ending: threading.Event) -> None:
        layers.append(ending)
        has_begun.set()
        ending.wait(600)  # as long as the layer takes
        check_not_ending(ending)

    for module in (any_decoder, fast_decoder):
        monkeypatch.setattr(module, "check_not_ending", check)

    async def scenario() -> None:
        request = asyncio.create_task(case.generate([1, 2, 3], Sampling(max_new_tokens=5)))
        await asyncio.to_thread(has_begun.wait)
        await asyncio.to_thread(case.engine.close)
        with pytest.raises(EngineError, match="was closed before the completion finished"):
            await request

    run(scenario())
    assert len(layers) == 1


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            qwen3(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), id="dynamic rope"
        ),
        pytest.param(transformers.MistralConfig(**SIZES, sliding_window=16), id="sliding window"),
        pytest.param(qwen3(hidden_act="gelu"), id="another activation"),
        pytest.param(gpt2(), id="another family"),
    ],
)
def test_what_the_fast_path_does_not_compute_goes_to_the_fallback(config: PretrainedConfig) -> None:
    assert find_family(config) is None


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(hybrid("minimax"), id="a cache of its own"),
        pytest.param(transformers.RecurrentGemmaConfig(**SIZES), id="no cache in the outputs"),
        pytest.param(transformers.MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1), id="no attention"),
    ],
)
def test_a_model_that_keeps_what_rows_cannot_share_is_refused_at_the_start(config: PretrainedConfig) -> None:
    with pytest.raises(ValueError, match=f"Models of type '{config.model_type}' need something else.*Use SGLangEngine"):
        LocalEngine().start(config)


def test_a_model_that_takes_other_steps_over_one_token_than_over_a_row_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"'falcon_h1' as it is trained.*time steps to \(0.01, 0.1\).*different model"):
        LocalEngine().start(hybrid("falcon_h1", time_step_limit=(0.01, 0.1)))


def completions_of(**changes: Any) -> list[Completion]:
    """Of six prompts at once, some of which stop early."""
    case = make_case(qwen3(), fast_path=True, dtype="float64")
    for name, value in changes.items():
        setattr(case.engine, name, value)
    case.engine.close()
    case.engine.start(case.models[0].config)
    case.load(0)

    async def wave() -> list[Completion]:
        await case.engine.pause()
        samplings = [Sampling(max_new_tokens=8 + 3 * i, stop_token_ids=tuple(range(2, 9)), seed=i) for i in range(6)]
        calls = [case.engine.generate([3 + i] * (i + 1), sampling, session="s") for i, sampling in enumerate(samplings)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0)
        await case.engine.resume()
        return [completion for (completion,) in await asyncio.gather(*tasks)]

    completions = run(wave())
    case.engine.close()
    return completions


def test_attention_in_four_dimensions_gives_the_same_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = completions_of()
    monkeypatch.setattr(fast_decoder, "_GROUPED", ("cpu",))  # as on a GPU
    for actual, wanted in zip(completions_of(), expected, strict=True):
        assert list(actual.token_ids) == list(wanted.token_ids)
        assert list(actual.logprobs) == pytest.approx(list(wanted.logprobs), abs=1e-6)


@pytest.mark.parametrize("rows", [0.5, 1, 2, 3])
def test_rows_wait_for_the_memory_of_key_values_and_get_the_same_tokens(rows: float) -> None:
    longest = 6 + 8 + 15  # of the last row, prompt included, which is rounded up to 32
    bound = rows * 32 * 2 * 2 * 2 * 16 * 8  # keys and values of 2 layers, 2 heads of 16, float64
    assert longest < 32
    expected = completions_of()
    for actual, wanted in zip(completions_of(key_value_bytes=bound), expected, strict=True):
        assert list(actual.token_ids) == list(wanted.token_ids)
        assert list(actual.logprobs) == pytest.approx(list(wanted.logprobs), abs=1e-6)


def test_a_batch_has_capacity_for_the_rows_whose_last_tokens_fit() -> None:
    decoder, batch = make_batch(max_rows=8)
    rows = [Row((3,) * 8, Sampling(max_new_tokens=number)) for number in (8, 8, 8, 40)]
    assert batch.capacity(rows) == 8  # without a bound
    decoder.cache_bytes = 3 * 16 * decoder.token_bytes
    assert batch.capacity(rows) == 3  # of 16 tokens each; a fourth needs 48
    assert batch.capacity(rows[::-1]) == 1  # which alone may exceed the bound
    with torch.inference_mode():
        batch.reserve(rows[:2])
        batch.admit(rows[:2], 0)
    assert batch.capacity([rows[2]]) == 2  # keys, or values, would be there twice while they are copied
    decoder.cache_bytes = 4 * 16 * decoder.token_bytes
    assert batch.capacity([rows[2]]) == 8


def test_a_step_reads_no_number_from_the_device() -> None:
    """But the tokens, all at once and only if a row may have ended."""
    _, batch = make_batch(max_rows=4)
    reads: list[str] = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero"):
                reads.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    rows = [Row((3, 4), Sampling(max_new_tokens=3 + i, stop_token_ids=(2,), seed=i)) for i in range(4)]
    with torch.inference_mode(), Reads():
        batch.admit(rows, 0)
        finished = [batch.retire()]
        while batch.size:
            batch.step()
            finished.append(batch.retire())
    assert sum(map(len, finished)) == 4
    assert not reads


def make_batch(max_rows: int) -> tuple[LlamaDecoder, RunningBatch]:
    config, cpu = qwen3(), torch.device("cpu")
    family = find_family(config)
    decoder = LlamaDecoder(config, family, dtype=torch.float32, device=cpu)
    return decoder, RunningBatch(decoder, max_rows=max_rows, vocab_size=config.vocab_size, device=cpu)


# With a bias before the convolution, padding would enter its state.
WITH_BIAS = [
    ("lfm2", {"conv_bias": True}),
    ("nemotron_h", {"use_bias": True}),
    ("falcon_h1", {"mamba_proj_bias": True}),
]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_5_text", {}),
        WITH_BIAS[0],
        *[
            pytest.param(*case, marks=pytest.mark.extra)
            for case in [*((family, {}) for family in HYBRIDS[1:]), *WITH_BIAS[1:]]
        ],
    ],
)
def test_rows_of_a_hybrid_that_join_and_leave_get_what_they_get_alone(family: str, changes: dict[str, Any]) -> None:
    """Rows differ in length; some exceed a chunk of 64 tokens."""
    models = make_models(hybrid(family, **changes), count=2)
    settings = [((3 + i,) * (1 + 23 * i % 60), Sampling(max_new_tokens=4 + 13 * i % 22, seed=i)) for i in range(6)]
    rows = [Row(prompt, sampling) for prompt, sampling in settings]
    together = decoded(models, {0: rows[:3], 2: rows[3:5], 9: rows[5:]})
    for row in rows:
        alone = decoded(models, {0: [row]})[row.sampling.seed]
        assert together[row.sampling.seed].token_ids == alone.token_ids
        assert list(together[row.sampling.seed].logprobs) == pytest.approx(list(alone.logprobs), abs=1e-5)
        expected = recomputed_logprobs(models[0], [*row.prompt], [*alone.token_ids], row.sampling)
        assert list(alone.logprobs) == pytest.approx(expected.tolist(), abs=1e-5)
    synced = decoded(models, {0: rows[:3], 2: rows[3:5], 9: rows[5:]}, load_after=6)
    for row in rows:
        completion = synced[row.sampling.seed]
        versions = torch.tensor(completion.weight_versions)
        for version, model in enumerate(models):
            expected = recomputed_logprobs(model, [*row.prompt], [*completion.token_ids], row.sampling)
            mine = versions == version
            torch.testing.assert_close(torch.tensor(completion.logprobs)[mine], expected[mine], atol=1e-5, rtol=0)
    assert any(set(completion.weight_versions) == {0, 1} for completion in synced.values())


@torch.inference_mode()
def decoded(
    models: list[PreTrainedModel], entering: dict[int, list[Row]], load_after: int | None = None
) -> dict[int, Completion]:
    """Completions by seed: rows enter before the steps of these numbers; the second model's weights come after one."""
    decoder = HuggingFaceDecoder(models[0].config, dtype=torch.float32, device=torch.device("cpu"))
    batch = RunningBatch(decoder, max_rows=8, vocab_size=61, device=torch.device("cpu"))
    completions: dict[int, Completion] = {}
    version = 0
    for step in range(1000):
        if step == 0 or step == load_after:
            version = int(step > 0)
            for name, parameter in models[version].named_parameters():
                decoder.write(name, parameter)
            batch.recompute(version)
        if step in entering:
            batch.admit([dataclasses.replace(row) for row in entering[step]], version)
        elif batch.size:
            batch.step()
        elif step > max(entering):
            break
        completions |= {row.sampling.seed: completion for row, completion in batch.retire()}
    return completions


@pytest.mark.parametrize(
    ("weights", "precision", "expected"),
    [
        (torch.float32, "32-true", "float32"),
        (torch.float32, "bf16-mixed", "bfloat16"),
        (torch.float32, "16-mixed", "float16"),
        (torch.bfloat16, "32-true", "bfloat16"),
    ],
)
@pytest.mark.parametrize("fast_path", [True, False], ids=["fast path", "fallback"])
def test_auto_is_the_dtype_in_which_the_trainer_computes(weights, precision, expected, fast_path) -> None:
    model, engine = new_model(qwen3(), dtype=weights), LocalEngine(fast_path=fast_path)
    engine.trainer_precision = precision
    engine.expect_policy(model, num_versions=1)
    assert engine.planned(torch.device("cpu"), 1).width == getattr(torch, expected).itemsize
    engine.start(model.config)
    assert engine.dtypes() == {expected}
    engine.close()


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "gpt_oss", "lfm2"])
def test_the_head_of_hugging_faces_code_reads_contiguous_states(family: str) -> None:
    """torch copies a bfloat16 weight for each row of a strided input, such as the last states of a batch."""
    config = family_spec(family).load_config()
    decoder = HuggingFaceDecoder(config, dtype=torch.bfloat16, device=torch.device("cpu"))
    states: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if getattr(module, "out_features", None) == config.vocab_size:
            states.append(inputs[0])

    with register_module_forward_pre_hook(keep):
        decoder.append([[2, 3, 4, 5], [6, 7, 8, 9]], [0, 1])
        decoder.step(torch.tensor([3, 4]), torch.tensor([4, 4]), 5)
    assert [tuple(state.shape[:2]) for state in states] == [(2, 1), (2, 1)]
    assert all(state.is_contiguous() for state in states)


def test_bfloat16_weights_serve() -> None:
    case = make_case(qwen3(), dtype="bfloat16")
    case.load(0)
    completion = run(case.generate([1, 2], Sampling(max_new_tokens=10)))[0]
    expected = recomputed_logprobs(case.models[0], [1, 2], completion.token_ids, Sampling())
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=0.2)
    case.engine.close()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("fast_path", [True, False], ids=["fast path", "fallback"])
def test_block_fp8_samples_with_rounded_weights_and_says_so(family: str, fast_path: bool) -> None:
    model = moe_model(family, **FP8_SIZES)
    trajectories = sampled(model, quantization="fp8", fast_path=fast_path)
    experience = Experience.from_trajectories(trajectories)
    rounded = copy.deepcopy(model)
    rounded.load_state_dict(block_fp8.dequantized(block_fp8.quantized(dict(model.named_parameters()))), strict=False)
    for policy, is_equal in ((rounded, True), (model, False)):
        (outputs,) = SingleModel(policy, LogprobSettings()).forward([experience])
        difference = (outputs.logprobs - experience.behavior_logprobs)[experience.loss_mask].abs().max()
        assert (difference < 1e-4) == is_equal


def test_with_importance_weights_the_expected_gradient_is_the_trainers_own() -> None:
    """All completions of one token, each with the probability that the engine gives it."""
    model, prompt = moe_model("qwen3", **FP8_SIZES).double(), [3, 7, 4]
    with engine_of(model, dtype="float64", quantization="fp8") as engine:
        assert engine.dtypes() == {"float64", "float8_e4m3fn"}
        scored = engine.score([[*prompt, token] for token in range(model.config.vocab_size)])["engine"]
    behavior = torch.tensor([logprobs[-1] for logprobs in scored])[:, None].double()
    advantages = torch.linspace(-1, 2, len(behavior)).double()

    def gradient(probabilities: torch.Tensor, weights: torch.Tensor | float) -> torch.Tensor:
        logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], -1)
        loss = -(probabilities * weights * advantages * logprobs).sum()
        return torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, list(model.parameters()))])

    with torch.no_grad():
        proximal = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], -1)[:, None]
    weights = ImportanceWeights()(proximal, behavior, torch.ones_like(behavior, dtype=torch.bool))[:, 0]
    expected = gradient(proximal[:, 0].exp(), 1.0)
    corrected, plain = (gradient(behavior[:, 0].exp(), factor) for factor in (weights, 1.0))
    assert (corrected - expected).norm() < 1e-5 * expected.norm()  # logprobs of the engine are float32
    assert (plain - expected).norm() > 1e-3 * expected.norm()


def test_a_model_whose_fp8_no_server_holds_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        LocalEngine(quantization="fp8").start(qwen3())


@pytest.mark.parametrize(
    "arguments",
    [
        *[{"max_batch": 0}, {"threads": 0}, {"max_context": 1}, {"prefill_tokens": 0}, {"dtype": "float31"}],
        {"quantization": "fp4"},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        LocalEngine(**arguments)
