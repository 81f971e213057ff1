"""DPO and IPO: a policy learns from pairs of completions, without a reward model and without rollouts.

Shapes: B pairs, T tokens. Rows 2i and 2i + 1 of a batch are pair i, the chosen trajectory first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrl.algorithms.supervised.module import SupervisedModule, SupervisedSettings
from lightrl.checks.annotations import Unpack
from lightrl.data import PairBatch
from lightrl.experience import Experience
from lightrl.functional import preference_loss, preference_margin
from lightrl.functional.losses import PreferenceLoss
from lightrl.models import ModelSpec, Role
from lightrl.models.tuning import tuning_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DPO(SupervisedModule):
    """Makes the chosen completion more likely than the rejected completion, relative to a reference policy.

    It trains on batches from PreferenceDataModule. It logs, as `dpo/…` per step and `val/…` per validation: `loss`;
    `accuracy_fraction`, how often the margin is above 0; `margin_nats`, how much more the policy prefers the chosen
    completion than the reference does; `chosen_nats` and `rejected_nats`, how both completions' logprobs have changed.

    Source: https://arxiv.org/abs/2305.18290.

    Args:
        policy: the model to train, usually an export from SFT.
        reference: the fixed policy for the KL penalty; None uses the initial policy. With LoRA, this is the same model
            without its adapters, which costs no memory.
        kl_coef: the paper's β; a larger value keeps the policy closer to the reference.
        kwargs: other arguments to SupervisedModule.
    """

    batch_type = PairBatch
    log_prefix = "dpo"
    preference_loss: PreferenceLoss = "sigmoid"

    policy: PreTrainedModel
    reference: PreTrainedModel

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        reference: str | ModelSpec | Role | None = None,
        kl_coef: float = 0.1,
        **kwargs: Unpack[SupervisedSettings],
    ) -> None:
        super().__init__(policy, **kwargs)
        preference_loss(torch.zeros(1), kl_coef=kl_coef)  # rejects invalid settings before anything is loaded
        self.reference_role = self.policy_role.initial if reference is None else Role.of(reference)
        if self.reference_role is not None:
            self.check_role("reference", self.reference_role)
        self.kl_coef = kl_coef

    def configure_model(self) -> None:
        super().configure_model()
        self.policy.eval()  # like the reference: with dropout, even equal policies would have a random margin

    def planned_roles(self) -> dict[str, Role]:
        return super().planned_roles() | ({} if self.reference_role is None else {"reference": self.reference_role})

    def measure(self, batch: PairBatch) -> dict[str, Tensor]:
        experience = batch.experience()
        # Run the reference first: its forward frees gathered parameters that the policy's backward needs.
        with torch.no_grad():
            if self.reference_role is not None:
                reference_logprobs = self._completion_logprobs("reference", experience)
            else:
                with tuning_of(self.policy).base_only(self.policy):
                    reference_logprobs = self._completion_logprobs("policy", experience)
        logprobs = self._completion_logprobs("policy", experience)
        chosen, rejected = logprobs[0::2], logprobs[1::2]
        margin = preference_margin(chosen, rejected, reference_logprobs[0::2], reference_logprobs[1::2])
        return {
            "loss": preference_loss(margin, kl_coef=self.kl_coef, kind=self.preference_loss),
            "accuracy_fraction": (margin.detach() > 0).float(),
            "margin_nats": margin.detach(),
            "chosen_nats": (chosen - reference_logprobs[0::2]).detach(),
            "rejected_nats": (rejected - reference_logprobs[1::2]).detach(),
        }

    def _completion_logprobs(self, role: str, experience: Experience) -> Tensor:
        """Sums the logprobs of each trajectory's loss tokens, [2B]; the policy's sums have a gradient."""
        outputs = self.parallel(role).measure(experience)
        return torch.where(experience.loss_mask, outputs.logprobs, 0.0).sum(1)


class IPO(DPO):
    """DPO with a target for the margin, 1/(2·kl_coef), so that noiseless pairs do not drift apart without bound.

    Source: https://arxiv.org/abs/2310.12036.
    """

    log_prefix = "ipo"
    preference_loss: PreferenceLoss = "ipo"
