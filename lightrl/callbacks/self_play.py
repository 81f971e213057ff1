"""SelfPlay: older versions of the policy as opponents in some MultiAgent episodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.callbacks.staleness import StalenessControl
from lightrl.checks.bounds import check_bounds
from lightrl.engines import LocalEngine
from lightrl.models.chat_template import with_stop_tokens
from lightrl.trajectory import sampling_seed
from lightrl.weights import Bucket
from lightrl.workflows.multi_agent import MultiAgent

if TYPE_CHECKING:
    import lightning as L
    from torch import Tensor

    from lightrl.engines import Completion
    from lightrl.module import RLModule
    from lightrl.rollout.rl_trainer import RLTrainer
    from lightrl.trajectory import Prompt

_BUCKET_BYTES = 1 << 28


class SelfPlay(RLCallback):
    """Keeps a pool of older versions; in a fraction of the training episodes, one of them plays one role.

    The run's seed determines which version plays in an iteration, and which episodes and roles it plays. The opponent
    decodes on rank 0, in the dtype of the policy's engine, with a second copy of the policy. The opponent's tokens are
    not in the trajectories, so they are never trained on. Checkpoints contain the pool, so a resumed run has the same
    opponents; each version is as large as the exported weights. `max_staleness` must be 0, so that no episode is still
    running when its opponent is replaced.

    Args:
        every_n_iterations: how often the current version joins the pool, which starts with the initial version.
        pool_size: number of versions kept; the oldest is removed first.
        fraction: share of the episodes, 0 to 1, with an opponent; in the others, the policy plays every agent.
    """

    def __init__(self, every_n_iterations: int = 20, *, pool_size: int = 4, fraction: float = 0.5) -> None:
        check_bounds(1, every_n_iterations=every_n_iterations, pool_size=pool_size)
        check_bounds(0, 1, fraction=fraction)
        self.every_n_iterations, self.pool_size, self.fraction = every_n_iterations, pool_size, fraction
        self.pool: dict[int, dict[str, Tensor]] = {}  # version → parameters by name, on rank 0
        self._engine: LocalEngine | None = None
        self._is_restored = False

    def before_fit(self, trainer: Any, module: Any, data: Any) -> None:
        if getattr(module, "workflow_workers", 0):
            raise ValueError("SelfPlay decodes in this process. Set workflow_workers to 0.")
        for control in trainer.callbacks:
            if isinstance(control, StalenessControl) and control.max_staleness:
                raise ValueError(
                    f"SelfPlay needs max_staleness=0, got {control.max_staleness}: otherwise, episodes continue while "
                    "the opponent's weights are replaced, so one episode would have several opponents. Set it to 0."
                )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        workflows: list[MultiAgent] = []
        if trainer.rollout.workflow is not None:  # on rank 0
            workflows = [item for item in _workflows(trainer.rollout.workflow) if isinstance(item, MultiAgent)]
        if not trainer.strategy.broadcast(bool(workflows)):  # only rank 0 has a workflow
            raise ValueError("SelfPlay plays an agent in the MultiAgent workflow. Set model.workflow to MultiAgent.")
        if workflows:
            dtypes = sorted(trainer.rollout.engine.dtypes() - {"float8_e4m3fn"})
            self._engine = LocalEngine(record_routes=False, dtype=dtypes[0] if dtypes else "auto")
            self._engine.trainer_precision = str(trainer.precision)
            self._engine.place([pl_module.device])
            self._engine.start(pl_module.policy_config)
            sampling = with_stop_tokens(pl_module.sampling, pl_module.stop_token_ids())
            run_seed, engine, root = trainer.rollout.run_seed, self._engine, trainer.rollout.workflow

            async def play(
                prompt: Prompt, session: str, turn: int, token_ids: list[int], max_new_tokens: int
            ) -> Completion:
                longest = min(root.sampling_of(prompt, sampling).max_new_tokens, max_new_tokens)
                seed = sampling_seed(run_seed, f"opponent/{session}", turn)
                request = replace(
                    sampling, seed=seed, max_new_tokens=longest, min_new_tokens=min(sampling.min_new_tokens, longest)
                )
                (completion,) = await engine.generate(token_ids, request, session=session)
                return completion

            def seat(session: str, roles: Sequence[str]) -> str | None:
                number = sampling_seed(run_seed, f"seat/{session}", 0)
                is_chosen = not session.startswith("validation:") and number / 2**63 < self.fraction
                return roles[sampling_seed(run_seed, f"role/{session}", 0) % len(roles)] if is_chosen else None

        if not self._is_restored:
            self._save(trainer, pl_module, trainer.weight_version)
        self._choose(trainer, trainer.weight_version)
        for workflow in workflows:  # last, because an opponent needs weights
            workflow.invite(play, seat)

    def on_weight_sync(self, trainer: RLTrainer, module: RLModule, weight_version: int) -> None:
        if weight_version % self.every_n_iterations == 0:
            self._save(trainer, module, weight_version)
        self._choose(trainer, weight_version)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def state_dict(self) -> dict[str, Any]:
        return {"pool": self.pool}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pool, self._is_restored = dict(state_dict["pool"]), True

    def _save(self, trainer: Any, module: RLModule, version: int) -> None:
        """Adds the current weights to the pool. Collective."""
        buckets = module.parallel_models["policy"].full_parameters(_BUCKET_BYTES)
        parameters = {
            name: tensor.detach().cpu().clone() for bucket in buckets for name, tensor in bucket.tensors.items()
        }
        if trainer.is_global_zero:
            self.pool[version] = parameters
            for old in sorted(self.pool)[: -self.pool_size]:
                del self.pool[old]

    def _choose(self, trainer: Any, version: int) -> None:
        """Loads the version that plays in the next iteration."""
        if self._engine is not None:
            pool = sorted(self.pool)
            chosen = pool[sampling_seed(trainer.rollout.run_seed, "opponent", version) % len(pool)]
            if chosen != self._engine.weight_version:
                self._engine.load_weights([Bucket(self.pool[chosen], is_last=True)], weight_version=chosen)


def _workflows(workflow: Any) -> Iterator[Any]:
    """Yields a workflow, and the workflows of the data sources if it has any."""
    yield workflow
    yield from getattr(workflow, "workflows", {}).values()
    if hasattr(workflow, "default"):
        yield workflow.default
