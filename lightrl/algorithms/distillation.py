"""Distillation: the policy generates, and learns from a teacher's distribution at every token.

Shapes: B trajectories, T tokens, the teacher's K most likely tokens at each position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lightrl.algorithms.grpo import GRPO, AllButBaseline
from lightrl.checks.annotations import Unpack
from lightrl.checks.bounds import check_effect
from lightrl.checks.user_code import function_of, user_code
from lightrl.dataflow import ModelCall
from lightrl.errors import LightRLError, TrainingError
from lightrl.experience import Experience
from lightrl.functional import Divergence, check_divergence, kl, rest_mass, topk_divergence
from lightrl.models import ModelSpec, Outputs, Role, context_tokens
from lightrl.models.chat_template import ChatTemplate, Messages
from lightrl.strategies.sharded_experience.other_prompts import SAME, OtherPrompts
from lightrl.trajectory import Prompt, Trajectory

# Returns what teachers read instead of the prompt: a user message's text, messages, token ids, or None for no change.
TeacherPrompt = Callable[[Trajectory], "str | Messages | list[int] | None"]


class Distillation(GRPO):
    """On-policy distillation: moves the policy towards a teacher on the policy's own completions.

    Without `teacher_topk` it minimizes the reverse KL, KL(policy ‖ teacher), by policy gradient. A token's advantage is
    the teacher's logprob minus the behavior policy's. Every token gets a signal, and no reward is needed.

    With `teacher_topk=K` a token's loss is a divergence between the models' distributions at its position, over the
    teacher's top-k tokens and one outcome for all others (`functional.topk_divergence`). This is far less noisy, but
    costs 12 · K bytes and K more logprobs per token. Its gradient does not depend on how the trajectory was sampled, so
    stale trajectories need no importance weights.

    Both models compute logprobs at the same sampling temperature. The teacher must have the policy's tokenizer.

    `teachers` assigns a teacher to each data source, or to each row; a teacher reads only its own trajectories. With
    `teacher_prompt`, teachers read a different prompt before the policy's tokens, such as the answer, a hint, or
    feedback on the finished trajectory. Without a teacher, the policy teaches itself: it reads that prompt with its
    weights at the start of the update.

    It logs `policy/kl_teacher_nats`, the reverse KL per token estimated from the sampled tokens. With `teacher_topk` it
    also logs `policy/teacher_divergence_nats`, the loss, and `policy/teacher_rest_fraction`, the teacher's probability
    of all tokens outside its top-k; if that is large, increase K.

    Source: https://thinkingmachines.ai/blog/on-policy-distillation; MiniLLM, https://arxiv.org/abs/2306.08543; with
    `teacher_topk`: GKD, https://arxiv.org/abs/2306.13649; `teacher_prompt`: context distillation,
    https://arxiv.org/abs/2209.15189, here on the policy's own completions.

    Args:
        policy: the student.
        teacher: the model to imitate; frozen. With `teachers`, it is the default teacher. If there is no
            teacher at all, the policy itself is the teacher, which needs `teacher_prompt`.
        teachers: name → teacher. The name is the label of a data source, or a row's value of `teacher_column`.
        teacher_column: the data column that names a row's teacher; None uses the label of the row's source.
        teacher_prompt: a function, or its dotted path, that takes a rewarded trajectory and returns what teachers
            read instead of everything before the policy's first token: the text of a user message, messages, token
            ids, or None for no change. It runs on rank 0. Trajectories with several conversations are rejected.
        teacher_topk: K; None uses only the teacher's logprobs of the sampled tokens.
        divergence: `reverse_kl`, `forward_kl` or `jsd`, with `teacher_topk`.
        jsd_beta: weight of the teacher, between 0 and 1, in the mixture that `jsd` compares each model with.
        reward: always computed and logged, but trained on only with `reward_coef`.
        reward_coef: weight of GRPO's group advantages, which are added to the teacher's advantages.
        group_size: completions per prompt; 1 is enough without `reward_coef`.
        kwargs: other arguments to GRPO.
    """

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        teacher: str | ModelSpec | Role | None = None,
        teachers: Mapping[str, str | ModelSpec | Role] | None = None,
        teacher_column: str | None = None,
        teacher_prompt: str | TeacherPrompt | None = None,
        teacher_topk: int | None = None,
        divergence: Divergence = "reverse_kl",
        jsd_beta: float = 0.5,
        reward_coef: float = 0.0,
        group_size: int = 1,
        advantage_mean: Literal["group", "batch"] | None = None,
        advantage_std: Literal["group", "batch"] | None = None,
        leave_one_out: bool = False,
        **kwargs: Unpack[AllButBaseline],
    ) -> None:
        if not reward_coef >= 0:
            raise ValueError(f"reward_coef must be >= 0 (0 trains on the teacher alone), got {reward_coef}.")
        if teacher_topk is not None and teacher_topk < 1:
            raise ValueError(f"teacher_topk must be at least 1, or null for sampled tokens only, got {teacher_topk}.")
        check_divergence(divergence, jsd_beta)
        if teacher_topk is None and divergence != "reverse_kl":
            raise ValueError(
                f"divergence={divergence!r} needs teacher_topk, because sampled tokens alone give reverse_kl. Set "
                "teacher_topk, for example to 32."
            )
        if teacher is None and not teachers and teacher_prompt is None:
            raise ValueError(
                "Distillation needs a teacher: set teacher or teachers, or teacher_prompt for a policy that learns "
                "from itself with a different prompt."
            )
        if not teachers:
            check_effect("without teachers", teacher_column=(teacher_column, None))
        if wrong := [name for name in teachers or () if not name.isidentifier()]:
            raise ValueError(f"Teacher names must consist of letters, digits and _, got {wrong[0]!r}. Rename it.")
        if divergence != "jsd":
            check_effect("unless divergence is 'jsd'", jsd_beta=(jsd_beta, 0.5))
        if not reward_coef:
            settings = {"advantage_mean": advantage_mean, "advantage_std": advantage_std, **kwargs}
            names = settings.keys() & {"advantage_mean", "advantage_std", "reward_shaping", "overlong_penalty"}
            check_effect("with reward_coef=0", **{name: (settings[name], None) for name in sorted(names)})
        if reward_coef and advantage_mean is None:
            advantage_mean = advantage_std = "group"
        super().__init__(
            policy,
            group_size=group_size,
            advantage_mean=advantage_mean,
            advantage_std=advantage_std,
            leave_one_out=leave_one_out,
            **kwargs,
        )
        if teacher_topk is not None and self.sampling.is_truncated:
            raise ValueError(
                f"teacher_topk={teacher_topk} compares the teacher's top-k tokens, which truncated sampling may "
                "leave out. Set sampling.top_p to 1 and top_k to -1, or remove teacher_topk."
            )
        if teacher_topk is not None and self.score_centering:
            raise ValueError("score_centering and teacher_topk need logprobs of different tokens. Remove one of them.")
        roles = {} if teacher is None else {"teacher": Role.of(teacher)}
        self.teacher_roles = roles | {f"teacher_{name}": Role.of(spec) for name, spec in (teachers or {}).items()}
        self.teacher_column = teacher_column
        self.teacher_prompt = None if teacher_prompt is None else function_of(teacher_prompt, "teacher_prompt")
        self.teacher_topk = teacher_topk
        self.divergence = divergence
        self.jsd_beta = jsd_beta
        self.reward_coef = reward_coef

    def configure_model(self) -> None:
        super().configure_model()
        for role in ("policy", *self.teacher_roles) if self.teacher_topk else ():
            if not hasattr(self, role):  # its model is on a server
                continue
            num_ids = getattr(self, role).config.get_text_config().vocab_size
            if self.teacher_topk > num_ids:
                raise ValueError(
                    f"teacher_topk must be at most {num_ids}, the size of the {role}'s vocabulary, got "
                    f"{self.teacher_topk}."
                )

    def before_fit(self, data: Any) -> None:
        """Checks that each labeled source has a teacher and each teacher has a source."""
        names = [name.removeprefix("teacher_") for name in self.teacher_roles if name != "teacher"]
        if not names or self.teacher_column is not None or not hasattr(data, "sources"):
            return
        labels = [source.label for source in data.sources["train"]]
        missing = [] if "teacher" in self.teacher_roles else [label for label in labels if label not in names]
        if missing or not set(names) <= set(labels):
            raise ValueError(
                f"teachers are named {names}, but the training data's sources are named {labels}. Name teachers after "
                "sources, and set teacher for sources without one; or name each row's teacher in a teacher_column."
            )

    def reward(self, trajectory: Trajectory) -> object:
        """Returns 0. A function given as `reward=` replaces this hook."""
        return 0.0

    def models(self) -> dict[str, Role]:
        return {**super().models(), **self.teacher_roles}

    def model_calls(self) -> list[ModelCall]:
        outputs: tuple[str, ...] = ("teacher_logprobs",)
        if self.teacher_topk is not None:
            outputs = (*outputs, "teacher_topk_ids", "teacher_topk_logprobs")
        # Call servers first, so that rank 0 does not have to complete rows from other teachers.
        roles = sorted(self.teacher_roles, key=lambda name: self.teacher_roles[name].spec.url is None) or ["policy"]
        is_plain = roles == ["teacher"] and self.teacher_prompt is None
        inputs = ("token_ids",) if self.teacher_prompt is None else ("token_ids", "rewards")
        teachers: list[ModelCall] = []
        for role in roles:
            teachers.append(
                ModelCall(
                    "teacher_logprobs" if role in ("teacher", "policy") else f"{role}_logprobs",
                    role,
                    "infer",
                    inputs,
                    outputs,
                    after=tuple(call.name for call in teachers),
                    prompts=None if is_plain else partial(self.prompts_of, role),
                    topk=self.teacher_topk or 0,
                )
            )
        return [*super().model_calls(), *teachers]

    def prompts_of(self, role: str, trajectories: Sequence[Trajectory]) -> list[list[int] | None]:
        """Returns this teacher's prompt for each trajectory: token ids, SAME, or None if it has another teacher.

        Raises:
            ValueError: if a trajectory has no teacher, or does not fit in the teacher's context with its new prompt.
            TrainingError: if `teacher_prompt` raises.
        """
        spec = self.models()[role].spec
        longest = None if spec.url is not None else context_tokens(spec.load_config())
        prompts: list[list[int] | None] = []
        for item in trajectories:
            if self._teacher_of(item.prompt) != role:
                prompts.append(None)
                continue
            prompt = SAME if self.teacher_prompt is None else self._other_prompt(item)
            num = len(prompt) + len(item.token_ids) - OtherPrompts.start_of(item)
            if prompt and longest is not None and num > longest:
                raise ValueError(
                    f"teacher_prompt of prompt {item.prompt.id!r} has {len(prompt)} tokens, {num} with the policy's, "
                    f"but the {role}'s context is {longest}. Shorten it, or lower max_new_tokens."
                )
            prompts.append(prompt)
        return prompts

    def _teacher_of(self, prompt: Prompt) -> str:
        name = prompt.source if self.teacher_column is None else prompt.fields.get(self.teacher_column)
        if f"teacher_{name}" in self.teacher_roles:
            return f"teacher_{name}"
        if self.teacher_roles and "teacher" not in self.teacher_roles:
            where = "its source's label" if self.teacher_column is None else f"its column {self.teacher_column!r}"
            raise ValueError(
                f"Prompt {prompt.id!r} has no teacher: {where} is {name!r}, but teachers are "
                f"{[*self.teacher_roles]}. Add this teacher, or set teacher as the default."
            )
        return "teacher" if self.teacher_roles else "policy"

    def _other_prompt(self, trajectory: Trajectory) -> list[int]:
        assert self.teacher_prompt is not None
        name = f"teacher_prompt on prompt {trajectory.prompt.id!r}"
        with user_code(lambda error: TrainingError(f"{name} raised {error!r}."), LightRLError):
            given: Any = self.teacher_prompt(trajectory)
            messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
            if not messages or isinstance(messages[0], int):
                return list(messages or SAME)
            template = ChatTemplate(self.tokenizer)
            if template.chat_template is None:
                return template.encode(template.plain_text(messages))
            return template.encode(template.render(messages, template.row_arguments(trajectory.prompt)))

    def advantages(self, experience: Experience) -> Tensor:
        local = experience.local
        if self.teacher_topk is not None:
            self._check_ids(local["teacher_topk_ids"])
            advantages = torch.zeros_like(local.behavior_logprobs)
        else:
            advantages = local["teacher_logprobs"] - local.behavior_logprobs
        if self.reward_coef:
            advantages = advantages + self.reward_coef * super().advantages(experience)[experience.local_rows, None]
        return advantages

    def loss(self, experience: Experience, outputs: Outputs) -> dict[str, Tensor]:
        divergence = kl(outputs.logprobs.detach(), experience["teacher_logprobs"], estimator="k1")
        result = {**super().loss(experience, outputs), "kl_teacher_nats": divergence}
        if self.teacher_topk is None:
            return result
        assert outputs.teacher_topk is not None
        teacher = experience["teacher_topk_logprobs"]
        loss = topk_divergence(outputs.teacher_topk, teacher, self.divergence, jsd_beta=self.jsd_beta)
        return {
            **result,
            "loss": result["loss"] + loss,
            "teacher_divergence_nats": loss.detach(),
            "teacher_rest_fraction": rest_mass(teacher),
        }

    def _check_ids(self, ids: Tensor) -> None:
        """Raises ValueError if a top-k id (for example from a server) is outside the policy's vocabulary."""
        num_ids, largest = self.policy_config.get_text_config().vocab_size, int(ids.max()) if ids.numel() else 0
        if largest >= num_ids:
            raise ValueError(
                f"The teacher's top {self.teacher_topk} tokens include id {largest}, but the policy's vocabulary "
                f"has {num_ids}. Use a teacher with the policy's tokenizer, or lower teacher_topk; a teacher loaded by "
                "path is limited to the policy's tokens."
            )
