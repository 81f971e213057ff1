"""ExpertBalance against independent computations: the loss's gradient in float64, and biases by a count of tokens."""

import copy
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_balance_run import RUNS, BySGD, Chats, spec
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from moe_cases import moe_spec
from rank_scripts import ROUNDING, run
from safetensors.torch import load_file
from tiny_run import POLICY, TinyGRPO, train
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import lightrl
from lightrl import SFT, ExpertBalance, FSDP2Strategy, LocalEngine, LoRA, RewardModel, RLCallback, Role
from lightrl.models.moe import moe_blocks, router_of
from lightrl.weights import Bucket

RATE, COEF = 0.25, 2.0
DENSE = moe_spec("qwen3_moe", mlp_only_layers=[0, 1, 2, 3])
MORE = ("mixtral", "gpt_oss", "olmoe", "qwen2_moe", "minimax_m2", "ernie4_5_moe", "granitemoe")
each_family = pytest.mark.parametrize(
    "family", ["qwen3_moe", *[pytest.param(name, marks=pytest.mark.extra) for name in MORE]]
)


def balancing_loss(model: Any, rows: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Tensor]]:
    """The loss of ExpertBalance by its definition, and the logprobs of each row's loss tokens; in the model's dtype.

    Args:
        rows: each trajectory's token ids [T] and loss mask [T].
    """
    seen: dict[Any, list[tuple[Tensor, Tensor]]] = {router_of(block): [] for block in moe_blocks(model).values()}

    def observe(router: Any, _: Any, output: Any) -> None:
        seen[router].append((output[0][:-1][predicts], output[2][:-1][predicts]))

    for router in seen:
        router.register_forward_hook(observe)
    logprobs = []
    for token_ids, loss_mask in rows:
        predicts = loss_mask[1:]
        logits = model(token_ids[None]).logits[0, :-1].log_softmax(-1)
        logprobs.append(logits.gather(1, token_ids[1:, None])[:, 0][predicts])
    losses = []
    for observed in seen.values():
        logits, experts = (torch.cat(parts) for parts in zip(*observed, strict=True))
        num_experts = logits.shape[1]
        loads = torch.stack([(experts == expert).sum() for expert in range(num_experts)]).double() / len(logits)
        losses.append(num_experts * (loads * logits.softmax(-1).mean(0)).sum())
        theirs = load_balancing_loss_func((logits,), num_experts, experts.shape[1])
        assert float(theirs) == pytest.approx(float(losses[-1]), rel=1e-6)
    assert len(losses) > 1
    return torch.stack(losses).mean(), logprobs


def in_float64(family: str) -> Any:
    model = spec(family).load_model().double().eval()
    model.set_experts_implementation("eager")  # grouped products have no float64
    return model


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


class FirstUpdate(Callback):
    """The batch and the gradients, by parameter, of a run's only update."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batch = copy.deepcopy(batch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients = gradients_of(pl_module.policy)

    def check(self, model: Any, loss: Tensor) -> None:
        loss.backward()
        expected = gradients_of(model)
        of_routers = [value for name, value in expected.items() if ".gate." in name or ".router." in name]
        assert max(float(value.abs().max()) for value in of_routers) > 1e-3
        for name, gradient in expected.items():
            error = (self.gradients[name].double() - gradient).abs().max()
            assert error <= ROUNDING * gradient.abs().max() + 1e-10, (name, float(error))


class Indifferent(TinyGRPO):
    """All rewards are equal, so the gradient is that of the balancing loss."""

    def reward(self, trajectory: Any) -> float:
        return 1.0


@pytest.mark.filterwarnings("ignore")
@each_family
def test_the_gradient_in_rl_is_that_of_the_loads_of_the_whole_minibatch(family: str, tmp_path: Path) -> None:
    module, update = Indifferent(spec(family), microbatch_tokens=20), FirstUpdate()
    train(tmp_path, module, callbacks=[ExpertBalance(loss_coef=COEF), update], max_steps=1)
    (experience,) = module.experiences
    model = in_float64(family)
    rows = zip(experience.token_ids, experience.loss_mask, experience.lengths.tolist(), strict=True)
    loss, _ = balancing_loss(model, [(ids[:length], mask[:length]) for ids, mask, length in rows])
    update.check(model, COEF * loss)


@each_family
def test_the_gradient_in_sft_is_that_of_both_losses_of_the_batch(family: str, tmp_path: Path) -> None:
    module, update = BySGD(spec(family), lr=0.1), FirstUpdate()
    train(tmp_path, module, Chats(batch_size=3), max_steps=1, callbacks=[ExpertBalance(0.0, COEF), update])
    model = in_float64(family)
    loss, logprobs = balancing_loss(model, zip(update.batch.token_ids, update.batch.loss_mask, strict=True))
    update.check(model, COEF * loss - torch.cat(logprobs).mean())


class Loads(RLCallback):
    """Counts, one by one, the experts of the tokens that predict loss tokens."""

    def __init__(self) -> None:
        self.counts: list[list[list[int]]] = []

    def on_experience_ready(self, trainer: Any, module: Any, experience: Any) -> None:
        counts = [[0] * 4 for _ in range(2)]
        routes, masks = experience.routes.tolist(), experience.loss_mask.tolist()
        for row, mask in zip(routes, masks, strict=True):
            for experts, predicts in zip(row, mask[1:], strict=False):
                for place, expert in enumerate(experts if predicts else []):
                    counts[place * 2 // len(experts)][expert] += 1  # two MoE blocks
        self.counts.append(counts)


class Receiving(LocalEngine):
    """Keeps the weights of the last load."""

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        kept = [Bucket(dict(bucket.tensors), bucket.is_last) for bucket in buckets]
        self.loaded = {name: value.clone() for bucket in kept for name, value in bucket.tensors.items()}
        super().load_weights(kept, weight_version=weight_version)


def biases(weights: dict[str, Tensor]) -> list[list[float]]:
    return [value.flatten().tolist() for name, value in sorted(weights.items()) if name.endswith("correction_bias")]


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("glm4_moe", marks=pytest.mark.extra)])
def test_biases_move_towards_idle_experts_once_an_iteration_and_reach_the_engine(family: str, tmp_path: Path) -> None:
    module, resumed = (TinyGRPO(spec(family), update_epochs=2, num_minibatches=2) for _ in range(2))
    saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    loads, engine = Loads(), Receiving()
    callbacks = [loads, ExpertBalance(RATE), saving]
    trainer = train(tmp_path, module, engine=engine, callbacks=callbacks, enable_checkpointing=True)
    expected = [[0.0] * 4 for _ in range(2)]
    for counts in loads.counts:
        for bias, of_layer in zip(expected, counts, strict=True):
            for expert, count in enumerate(of_layer):
                bias[expert] += RATE * ((4 * count < sum(of_layer)) - (4 * count > sum(of_layer)))
    assert len(loads.counts) == 3
    assert any(map(any, expected))
    assert biases(module.policy.state_dict()) == biases(engine.loaded) == expected
    ratio = sum(max(row) / (sum(row) / 4) for row in loads.counts[-1]) / 2
    assert trainer.callback_metrics["rollout/expert_load_max_ratio"] == pytest.approx(ratio)
    train(tmp_path, resumed, callbacks=[ExpertBalance(RATE)], ckpt_path=tmp_path / "saved" / "step=2.ckpt")
    assert biases(resumed.policy.state_dict()) == expected


@pytest.mark.extra
def test_two_ranks_balance_as_one_process_does(tmp_path: Path) -> None:
    run(Path(__file__).with_name("expert_balance_run.py"), tmp_path)
    ratios = [torch.load(tmp_path / f"{size}.ratios") for size in (1, 2)]
    assert ratios[1] == pytest.approx(ratios[0])
    for name in RUNS:
        one, two = (load_file(tmp_path / f"{size} {name}" / "model.safetensors") for size in (1, 2))
        assert one.keys() == two.keys()
        for key, value in one.items():
            assert (two[key] - value).abs().max() <= ROUNDING * value.abs().max(), (name, key)
        assert any(key.endswith("bias") and value.any() for key, value in one.items()) or name == "loss"


@pytest.mark.parametrize(
    ("policy", "balance", "message"),
    [
        (spec("qwen3_moe"), ExpertBalance(RATE), "needs routers that choose by a bias"),
        (POLICY, ExpertBalance(RATE), "support qwen3, whose blocks have no experts or not equally many"),
        (spec("deepseek_v3"), ExpertBalance(), "changes nothing for"),
        (spec("deepseek_v3"), ExpertBalance(loss_coef=COEF), "has no router_aux_loss_coef"),
        (Role(spec("deepseek_v3"), lora=LoRA(rank=2)), ExpertBalance(RATE), "which lora does not train"),
        (spec("deepseek_v3"), ExpertBalance(RATE), "needs each token's experts"),
    ],
)
def test_what_cannot_be_balanced_is_refused(policy: Any, balance: ExpertBalance, message: str, tmp_path: Path) -> None:
    engine = LocalEngine(record_routes=False if "each token's experts" in message else None)
    module = TinyGRPO(policy)
    with pytest.raises(ValueError, match=message):
        train(tmp_path, module, callbacks=[balance], engine=engine)
    assert hasattr(module, "policy") == ("needs routers" in message)  # what a config shows is refused without a model


def test_trees_are_refused() -> None:
    trees: Any = SimpleNamespace(local=SimpleNamespace(gaps=torch.zeros(1, 2)))
    with pytest.raises(ValueError, match="does not support trees"):
        ExpertBalance(RATE).on_experience_ready(SimpleNamespace(), TinyGRPO(), trees)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"kind": RewardModel}, "supports RL and SFT, not RewardModel"),
        ({"policy": DENSE}, "support qwen3_moe, whose blocks have no experts or not equally many"),
        ({"strategy": lightrl.Parallel3DStrategy(tp=2)}, "Parallel3DStrategy"),
        ({"strategy": FSDP2Strategy(cp=2)}, "cp above 1"),
        ({"strategy": FSDP2Strategy(compile_layers=True)}, "compile_layers"),
        ({"strategy": FSDP2Strategy(offload_to_cpu=["parameters"])}, "parameters in offload_to_cpu with bias_rate"),
        ({"precision": "16-mixed"}, "precision='16-mixed'"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches above 1 with a loss"),
    ],
)
def test_what_no_run_can_balance_is_refused_before_a_model_is_loaded(run: dict[str, Any], message: str) -> None:
    trainer: Any = SimpleNamespace(**{"strategy": None, "precision": "32-true", "accumulate_grad_batches": 1, **run})
    with pytest.raises(ValueError, match=message):
        ExpertBalance(RATE, COEF).setup(trainer, run.get("kind", SFT)(run.get("policy", spec("qwen3_moe"))), "fit")


@pytest.mark.filterwarnings("ignore")  # torch.compile imports what is deprecated
@pytest.mark.parametrize(("change", "message"), [("bfloat16", "float32 biases"), ("compile", "a compiled policy")])
def test_a_policy_whose_biases_round_or_that_is_compiled_is_refused(change: str, message: str) -> None:
    module, trainer = SimpleNamespace(policy=spec("deepseek_v3").load_model()), SimpleNamespace(strategy=None)
    getattr(module.policy, change)()
    with pytest.raises(ValueError, match=message):
        ExpertBalance(RATE).on_fit_start(trainer, module)


def test_a_rank_without_the_policy_does_not_miss_its_biases() -> None:
    strategy = SimpleNamespace(ranks=SimpleNamespace(of_role=lambda role: SimpleNamespace(is_here=False)))
    ExpertBalance(RATE).on_fit_start(SimpleNamespace(strategy=strategy), SimpleNamespace(policy=torch.nn.Module()))


def test_a_second_one_and_gradients_that_a_scheduler_accumulates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="A trainer takes one ExpertBalance callback, got 2"):
        train(tmp_path, TinyGRPO(POLICY), callbacks=[ExpertBalance(), ExpertBalance()])
    callbacks = [ExpertBalance(loss_coef=COEF), GradientAccumulationScheduler({1: 2})]
    with pytest.raises(ValueError, match="accumulate_grad_batches above 1 with a loss"):
        train(tmp_path, BySGD(spec("qwen3_moe"), lr=0.1), Chats(batch_size=3), callbacks=callbacks, max_epochs=2)
