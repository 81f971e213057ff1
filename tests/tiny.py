"""Tiny policies, a tokenizer of characters and random ragged experience, for tests that run a model.

Shapes: B trajectories, T tokens, V = 17 tokens of the vocabulary.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightrl.experience import Experience, row_tensors
from lightrl.functional import encode_supports
from lightrl.models import ModelSpec
from lightrl.testing import LETTERS, QUIET, TINY_CONFIG, char_tokenizer, tiny_policy
from lightrl.trajectory import Prompt, Trajectory

__all__ = ["LETTERS", "QUIET", "char_tokenizer"]

VOCABULARY = len(LETTERS)

_COMMON: dict[str, Any] = {name: value for name, value in TINY_CONFIG.items() if name != "model_type"}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_COMMON, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **_COMMON},
    "qwen3": {"model_type": "qwen3", **_COMMON},
    "gpt2": {"model_type": "gpt2", **_GPT2, "bos_token_id": None, "initializer_range": 0.4},
    "mistral with a window": {"model_type": "mistral", **_COMMON, "sliding_window": 3},
    "gemma2 with capped logits": {"model_type": "gemma2", **_COMMON, "sliding_window": 3, "query_pre_attn_scalar": 4},
    "gemma3 hybrid": {
        "model_type": "gemma3_text",
        **_COMMON,
        "sliding_window": 3,
        "query_pre_attn_scalar": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def not_a_tokenizer() -> int:
    return 3


def tiny_spec(family: str = "qwen3", **options: Any) -> ModelSpec:
    """Random weights, the same for each test."""
    return tiny_policy(**{"config": FAMILIES[family], **options})


def tiny_model(family: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    values = {**FAMILIES[family], **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(values.pop("model_type"), **values), dtype=dtype
        ).eval()


def random_trajectories(
    num_groups: int = 3,
    group_size: int = 3,
    *,
    prompt_tokens: tuple[int, int] = (1, 6),
    completion_tokens: tuple[int, int] = (1, 8),
    num_turns: int = 1,
    seed: int = 0,
) -> list[Trajectory]:
    """Groups with a prompt each; several turns are told apart by two tokens of an environment."""
    draw = random.Random(seed)

    def token_ids(num: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(num)]

    def one(group: int, sample: int, prompt: list[int]) -> Trajectory:
        ids, mask = list(prompt), [False] * len(prompt)
        for turn in range(num_turns):
            said = token_ids(draw.randint(*completion_tokens))
            ids, mask = ids + said, mask + [True] * len(said)
            if turn + 1 < num_turns:
                ids, mask = ids + token_ids(2), mask + [False] * 2
        return Trajectory(
            prompt=Prompt(id=f"prompt-{group}", token_ids=prompt), group_id=group, sample=sample, token_ids=ids,
            loss_mask=mask, behavior_logprobs=[-3 * draw.random() if trains else 0.0 for trains in mask],
            weight_versions=[4 if trains else -1 for trains in mask], completion_ids=said, completion="",
            reward=draw.choice([0.0, 0.25, 1.0]),
        )  # fmt: skip

    prompts = [token_ids(draw.randint(*prompt_tokens)) for _ in range(num_groups)]
    return [one(group, sample, prompt) for group, prompt in enumerate(prompts) for sample in range(group_size)]


def random_experience(*, is_scored: bool = True, topk: int = 0, **settings: Any) -> Experience:
    """Experience of `random_trajectories`; scored ones have what models say of them too, and every third is truncated.

    With `topk` a teacher has said its likeliest tokens.
    """
    experience = Experience.from_trajectories(random_trajectories(**settings))
    if topk:
        experience = with_teacher_topk(experience, topk)
    if not is_scored:
        return experience
    generator = torch.Generator().manual_seed(1)
    is_truncated = torch.arange(len(experience)) % 3 == 0

    def near(values: Tensor, scale: float) -> Tensor:
        noise = torch.randn(values.shape, generator=generator) * scale
        return torch.where(experience.loss_mask, values + noise, 0.0)

    return replace(
        experience,
        proximal_logprobs=near(experience.behavior_logprobs, 0.3),
        reference_logprobs=near(experience.behavior_logprobs, 0.3),
        advantages=near(torch.zeros(experience.token_ids.shape), 1.0),
        teacher_logprobs=near(experience.behavior_logprobs, 0.3),
        values=near(torch.zeros(experience.token_ids.shape), 0.5),
        is_truncated=is_truncated,
        bootstrap_values=torch.where(is_truncated, 0.7, 0.0),
        returns=near(torch.zeros(experience.token_ids.shape), 0.5),
    )


def with_teacher_topk(experience: Experience, num: int) -> Experience:
    """With the likeliest tokens of a teacher that says something else at each place."""
    generator = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(*experience.token_ids.shape, VOCABULARY, generator=generator)
    found = torch.log_softmax(logits, -1).topk(num, -1)
    mask = experience.loss_mask[..., None]
    topk = {"teacher_topk_ids": found.indices * mask, "teacher_topk_logprobs": found.values * mask}
    return experience.with_tensors(topk)


def with_supports(experience: Experience, vocabulary: int = VOCABULARY) -> tuple[Experience, Tensor]:
    """Adds random supports of the loss tokens, some of them a single token and some the whole vocabulary.

    Returns:
        The experience, and the supports as bool [B, T, V].
    """
    generator = torch.Generator().manual_seed(4)
    shape = experience.token_ids.shape
    share = torch.rand(*shape, 1, generator=generator)
    allowed = torch.rand(*shape, vocabulary, generator=generator) < torch.where(share > 0.8, 1.0, share - 0.1)
    allowed.scatter_(-1, experience.token_ids[..., None], True)
    allowed |= ~experience.loss_mask[..., None]
    parts = []
    for row, length in enumerate(experience.lengths.tolist()):
        places = allowed[row, :length].nonzero().numpy()
        codes = encode_supports(
            places[:, 0], places[:, 1], experience.token_ids[row, :length].numpy(), vocabulary=vocabulary
        )
        parts.append(torch.frombuffer(bytearray(b"".join(codes)), dtype=torch.uint8))
    return experience.with_tensors(row_tensors("supports", parts)), allowed


def slow_distributions(model, experience, *, temperature=1.0, min_new_tokens=0, stop_token_ids=(), allowed=None):
    """Log-probabilities [B, T, V] from Hugging Face's logits, one trajectory and one token at a time; else 0."""
    found = torch.zeros(*experience.token_ids.shape, VOCABULARY)
    for row, length in enumerate(experience.lengths.tolist()):
        token_ids = experience.token_ids[row, :length]
        logits = model(input_ids=token_ids[None], use_cache=False).logits[0].float() / temperature
        written = 0
        for t in range(1, length):
            written = written + 1 if experience.loss_mask[row, t] else 0
            if written == 0:
                continue
            predicted = logits[t - 1].clone()
            if written <= min_new_tokens:
                predicted[list(stop_token_ids)] = -1e30
            if allowed is not None:
                predicted[~allowed[row, t]] = -1e30
            place = (torch.tensor(row), torch.tensor(t))
            found = found.index_put(place, torch.log_softmax(predicted, -1))
    return found


def slow_outputs(model, experience, *, temperature=1.0, min_new_tokens=0, stop_token_ids=(), allowed=None):
    """Logprobs and entropy [B, T] from Hugging Face's logits, one trajectory and one token at a time."""
    rules: dict[str, Any] = {"min_new_tokens": min_new_tokens, "stop_token_ids": stop_token_ids, "allowed": allowed}
    found = slow_distributions(model, experience, temperature=temperature, **rules)
    logprobs = found.gather(-1, experience.token_ids[..., None])[..., 0]
    return logprobs, -(found.exp() * found.clamp(min=-1e9)).sum(-1)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter name; the parameters' own are cleared."""
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def widened(experience: Experience, num: int, fill: float = 0.0) -> Experience:
    """Adds `num` columns of padding; `fill` stands there in float fields."""
    changes = {}
    for name, value in experience.tensors().items():
        if value.dim() >= 2:
            what: Any = fill if value.is_floating_point() else -1 if name == "weight_versions" else 0
            further = (0, 0) * (value.dim() - 2)
            changes[name] = torch.nn.functional.pad(value, (*further, 0, num), value=what)
    return experience.with_tensors(changes)


def float_fields(experience: Experience) -> Iterator[tuple[str, Tensor]]:
    for name, value in experience.tensors().items():
        if value.dim() >= 2 and value.is_floating_point():
            yield name, value


def rollout_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint has of the rollout."""
    loops = torch.load(checkpoint, weights_only=True)["loops"]["fit_loop"]
    return loops["epoch_loop.automatic_optimization.state_dict"]["rollout"]


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation gave, backward included."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor):
                self.num = max(self.num, item.numel())
        return result
