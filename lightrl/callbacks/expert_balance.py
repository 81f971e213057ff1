"""ExpertBalance: balances the load of an MoE model's experts, with an extra loss or with the routers' biases.

Shapes: N tokens of a forward, L MoE blocks, E experts of a block, k experts of a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.checks.bounds import check_bounds
from lightrl.data import ChatBatch
from lightrl.experience import Experience
from lightrl.models.moe import moe_blocks, num_experts, router_of
from lightrl.models.routes import RouteLayout, Routes
from lightrl.module import RLModule
from lightrl.strategies import ranks_of
from lightrl.strategies.ranks.role_mesh import planned_roles
from lightrl.weights.bucket import ROUTER_BIASES

if TYPE_CHECKING:
    import lightning as L
    from torch.utils.hooks import RemovableHandle

    from lightrl.rollout.rl_trainer import RLTrainer

_COEF, _ACCUMULATES = "router_aux_loss_coef", "accumulate_grad_batches above 1 with a loss"
_NO_ROUTES = (
    "ExpertBalance needs each token's experts from the engine. Use LocalEngine, or servers that return them, with "
    "record_routes: true."
)

# Whether each token of the running forward predicts a loss token, bool [N].
_predicts: ContextVar[Tensor | None] = ContextVar("tokens that predict loss tokens", default=None)


class ExpertBalance(RLCallback):
    """Balances the policy's experts in RL and in SFT, in one process or on the ranks of FSDP2Strategy.

    An expert's load is the number of tokens that it computes in the whole batch; only tokens that predict a loss token
    count. In RL the batch is a minibatch (for biases, an iteration), in SFT the rows that all ranks read for a step.
    Balancing each microbatch or rank alone would force every handful of trajectories to use all experts.

    The loss is `loss_coef` · mean over layers of E Σᵢ fᵢ Pᵢ. fᵢ is the load of expert i divided by the number of these
    tokens, so Σᵢ fᵢ = k; Pᵢ is the mean of softmax(router logits)ᵢ over them. For one layer this is transformers' loss
    for the whole batch; transformers adds up the loads of all layers, so one layer can hide the imbalance of another.
    The logged loss does not include it.

    In each iteration or step, a bias moves by `bias_rate` towards experts with less than the mean load. A bias
    affects which experts a token gets, but not their weights. In RL it moves after the first update, before the
    weight sync, so the engine samples with the biases of the trainer's checkpoint of that version; servers get them in
    float32. A LocalEngine in bfloat16 rounds them.

    In RL the load comes from the engine's routes, which the update replays. In SFT the loss needs one more forward pass
    per step. Logs `rollout/expert_load_max_ratio` or `sft/expert_load_max_ratio`.

    Sources: loss over the global batch, https://arxiv.org/abs/2501.11873; biases, https://arxiv.org/abs/2408.15664.

    Args:
        bias_rate: how far a bias moves in an iteration or step; DeepSeek-V3 used 0.001 for most of its pretraining.
        loss_coef: the loss's coefficient; None uses the config's `router_aux_loss_coef`, or 0 without one.

    Raises:
        ValueError: when `fit` starts, if the model or the run does not allow the setting; in an RL iteration without
            routes or with trees; when a scheduler starts to accumulate gradients.

    Example:
        Trainer(callbacks=[ExpertBalance()])
    """

    is_single = True

    def __init__(self, bias_rate: float = 0.0, loss_coef: float | None = None) -> None:
        check_bounds(0, bias_rate=bias_rate, loss_coef=loss_coef)
        self.bias_rate = bias_rate
        self.loss_coef = loss_coef
        self._coef = 0.0
        self._layout: RouteLayout | None = None
        self._loads: Tensor | None = None  # int64 [L, E], of the iteration or step
        self._counts: Tensor | None = None  # the loads that this rank is counting
        self._pull: Tensor | None = None  # float32 [L, E], loss gradient with respect to a token's P, divided by k
        self._step = 0
        self._hooks: list[RemovableHandle] = []

    def before_fit(self, trainer: Any, module: Any, data: Any) -> None:
        if not isinstance(module, RLModule) and getattr(module, "batch_type", None) is not ChatBatch:  # not SFT
            raise ValueError(f"ExpertBalance supports RL and SFT, not {type(module).__name__}. Remove it.")
        role, strategy = planned_roles(module)["policy"], trainer.strategy
        config = role.spec.load_config().get_text_config()
        self._coef = float((getattr(config, _COEF, 0.0) if self.loss_coef is None else self.loss_coef) or 0.0)
        if not self.bias_rate and not self._coef:
            raise ValueError(f"ExpertBalance changes nothing for {config.model_type}. Set bias_rate or loss_coef.")
        if self.bias_rate and role.tuning.keeps_base:
            raise ValueError("bias_rate changes the base model, which lora does not train. Set it to 0, or omit lora.")
        if self._coef and not hasattr(config, _COEF):
            raise ValueError(
                f"loss_coef needs a family for which transformers defines a balancing loss, but the config of "
                f"{config.model_type} has no {_COEF}. Set loss_coef to 0; if its routers have biases, set bias_rate."
            )
        _refuse(
            {
                "Parallel3DStrategy": hasattr(strategy, "pp"),
                "precision='16-mixed'": trainer.precision == "16-mixed" and self._coef,
                "cp above 1": getattr(strategy, "cp", 1) > 1,
                "compile_layers": getattr(strategy, "compile_layers", None),
                "parameters in offload_to_cpu with bias_rate": self.bias_rate
                and "parameters" in getattr(strategy, "offload_to_cpu", ()),
                _ACCUMULATES: trainer.accumulate_grad_batches > 1 and self._coef,
            }
        )
        if isinstance(module, RLModule) and trainer.engine is not None and not trainer.engine.records_columns:
            raise ValueError(_NO_ROUTES)
        self._layout = RouteLayout.of(role.spec.load_config())
        _refuse({f"{config.model_type}, whose blocks have no experts or not equally many": self._layout is None})

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        model = pl_module.policy
        biases, name = _biases(model), type(model).__name__
        is_here = ranks_of(trainer.strategy).of_role("policy").is_here  # the model is empty on other ranks
        if self.bias_rate and is_here and (not biases or any(bias is None for bias in biases)):
            raise ValueError(
                f"bias_rate needs routers that choose by a bias, such as DeepSeek-V3's, but those of {name} do not. "
                "Set it to 0."
            )
        if self.bias_rate and any(bias is not None and bias.dtype != torch.float32 for bias in biases):
            raise ValueError(f"bias_rate needs float32 biases: bfloat16 would round small bias updates in {name} away.")
        _refuse({"a compiled policy": any(module._compiled_call_impl is not None for module in model.modules())})
        self.teardown(trainer, pl_module, "fit")  # a failed run does not call it
        routers = map(router_of, moe_blocks(model).values())
        self._hooks = [
            router.register_forward_hook(partial(self._observe, index)) for index, router in enumerate(routers)
        ]

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self._loads = self._counts = self._pull = None
        while self._hooks:
            self._hooks.pop().remove()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._step = trainer.global_step

    @torch.no_grad()
    def on_experience_ready(self, trainer: RLTrainer, module: RLModule, experience: Experience) -> None:
        self._loads = self._loads_of(experience)
        module.log("rollout/expert_load_max_ratio", _max_ratio(self._loads))

    def on_minibatch_start(
        self, trainer: RLTrainer, module: RLModule, minibatch: Experience, index: int, total: int
    ) -> None:
        if not self._coef:
            return
        loads, ranks = self._loads_of(minibatch), ranks_of(trainer.strategy).of_role("policy")
        if ranks.is_here:
            self._mark_tokens(module.parallel_models["policy"])
            self._set_pull(loads, minibatch.num_loss_tokens, ranks.dp_size, module.device)

    def on_minibatch_end(
        self, trainer: RLTrainer, module: RLModule, metrics: dict[str, float], index: int, total: int
    ) -> None:
        self._pull = None
        is_here, policy = ranks_of(trainer.strategy).of_role("policy").is_here, cast("torch.nn.Module", module.policy)
        if self.bias_rate and index == 0 and is_here and self._loads is not None:  # later updates replay routes
            self._move_biases(policy, self._loads)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(pl_module, RLModule):
            return
        _refuse({_ACCUMULATES: trainer.accumulate_grad_batches > 1 and self._coef})  # a scheduler may have raised it
        model, ranks = pl_module.parallel("policy"), ranks_of(trainer.strategy)
        self._mark_tokens(model)
        share = batch if ranks.dp_size == 1 else batch.share(ranks.dp_rank, ranks.dp_size)
        experience = (batch.share(0, ranks.dp_size) if share is None else share).experience()
        blocks = moe_blocks(model.model)
        counts = torch.zeros(len(blocks), num_experts(next(iter(blocks.values()))), dtype=torch.int64)
        self._counts = counts.to(pl_module.device)
        if self._coef:
            with torch.no_grad(), trainer.precision_plugin.forward_context():
                model.measure(experience)
            num = torch.tensor(0 if share is None else int(experience.loss_mask.sum()))
            counts, self._counts = self._counts, None
            loads = ranks.total(counts if share is not None else torch.zeros_like(counts))
            factor = 0 if share is None else ranks.dp_size
            self._loads = loads if self._loads is None else self._loads + loads
            self._set_pull(loads, int(ranks.total(num)), factor, pl_module.device)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(pl_module, RLModule):
            return
        ranks, self._pull = ranks_of(trainer.strategy), None
        if self._counts is not None:
            has_rows = ranks.dp_size == 1 or batch.share(ranks.dp_rank, ranks.dp_size) is not None
            loads = ranks.total(self._counts * has_rows)
            self._loads, self._counts = loads if self._loads is None else self._loads + loads, None
        if trainer.global_step == self._step or self._loads is None:
            return  # gradients are still accumulated
        self._step = trainer.global_step
        if self.bias_rate:
            self._move_biases(pl_module.policy, self._loads)
        pl_module.log(f"{pl_module.log_prefix}/expert_load_max_ratio", _max_ratio(self._loads), on_epoch=False)
        self._loads = None

    @torch.no_grad()
    def _loads_of(self, experience: Experience) -> Tensor:
        """Returns how many tokens that predict loss tokens each expert got on all ranks, int64 [L, E]."""
        local = experience.local
        if local.gaps is not None:
            raise ValueError("ExpertBalance does not support trees of trajectories. Remove one of the two.")
        if local.routes is None or self._layout is None:
            raise ValueError(_NO_ROUTES)
        return experience.total(self._layout.load(local.routes[:, :-1][local.loss_mask[:, 1:]]))

    def _mark_tokens(self, model: Any) -> None:
        if not isinstance(model.routes, _PredictingTokens):
            model.routes = _PredictingTokens(model.model)

    def _set_pull(self, loads: Tensor, num_tokens: int, dp_size: int, device: torch.device) -> None:
        """Prepares the gradients of a batch; they are averaged over `dp_size` ranks, but must be summed."""
        shares = loads.double() / loads.sum(1, keepdim=True).clamp(min=1)
        factor = self._coef * loads.shape[1] * dp_size / (loads.shape[0] * max(1, num_tokens))
        self._pull = (shares * factor).float().to(device)

    @torch.no_grad()
    def _observe(self, index: int, router: torch.nn.Module, args: Any, output: Any) -> None:
        """Counts the tokens of a router's experts, and adds the loss's gradient to the gradient of its logits."""
        predicts = _predicts.get()
        if predicts is None or not len(predicts) or (self._counts is None and self._pull is None):
            return
        is_triple = isinstance(output, tuple) and len(output) == 3
        if not is_triple or output[0].dim() != 2 or len(output[0]) != len(predicts):
            raise ValueError(
                f"ExpertBalance needs routers that return (logits, weights, experts) for each token, but "
                f"{type(router).__name__} does not. Remove it."
            )
        logits, _, experts = output
        if self._counts is not None:
            self._counts[index] += torch.bincount(experts[predicts].flatten(), minlength=logits.shape[1])
        if self._pull is not None and logits.requires_grad:
            pull = self._pull[index] * experts.shape[1]
            probabilities = logits.float().softmax(-1)
            gradient = probabilities * (pull - (probabilities @ pull)[:, None]) * predicts[:, None]
            logits.register_hook(lambda value: value + gradient.to(value.dtype))

    @torch.no_grad()
    def _move_biases(self, model: torch.nn.Module, loads: Tensor) -> None:
        means = loads.double().mean(1, keepdim=True)
        for bias, change in zip(_biases(model), self.bias_rate * torch.sign(means - loads), strict=True):
            assert bias is not None, "checked at the start"
            moved = change.to(bias.device, bias.dtype).view(bias.shape)
            if isinstance(bias, DTensor):
                moved = distribute_tensor(moved, bias.device_mesh, bias.placements, src_data_rank=None)
            bias += moved


class _PredictingTokens(Routes):
    """Routes that also mark, for `_observe`, which tokens of a forward predict loss tokens.

    No forward computes a token for several trajectories, because such a token would count once.
    """

    def replays(self, experience: Experience) -> bool:
        return True

    @contextlib.contextmanager
    def at(self, experience: Experience, rows: Tensor, columns: Tensor | slice) -> Iterator[None]:
        predicts = torch.nn.functional.pad(experience.loss_mask[:, 1:], (0, 1))
        token = _predicts.set(predicts[rows, columns].flatten())  # for `_observe`
        try:
            with super().at(experience, rows, columns):
                yield
        finally:
            _predicts.reset(token)


def _refuse(problems: dict[str, Any]) -> None:
    if present := [problem for problem, is_present in problems.items() if is_present]:
        raise ValueError(f"ExpertBalance does not support {present[0]}. Remove one of the two.")


def _max_ratio(loads: Tensor) -> float:
    """Returns the largest load ÷ the mean load, averaged over layers."""
    values = loads.double()
    return float((values.amax(1) / values.mean(1).clamp(min=1e-9)).mean())


def _biases(model: torch.nn.Module) -> list[Tensor | None]:
    """Returns the bias of each MoE block's router; None for a block without one."""
    biases = []
    for block in moe_blocks(model).values():
        named = chain(block.named_parameters(), block.named_buffers())
        values = (value for name, value in named if name.endswith(ROUTER_BIASES))
        biases.append(next((value for value in values if value.numel() == num_experts(block)), None))
    return biases
