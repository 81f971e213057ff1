"""The update and the logprobs of a language model on one GPU: tokens/s, MFU and memory, against a plain training loop.

    python -m benchmarks.gpu_update [--quick] [--models qwen3-0.6b,qwen3-1.7b] [--tokens 4096,8192,16384] [--repeats 5]

Both contenders have the same random weights in bfloat16, the same trajectories (completions of lengths.py, with prompts
of a quarter of the longest) and fused AdamW, and take turns. A round is one microbatch of a number of unpadded tokens.

    plain    a Hugging Face training loop: rows padded to the longest, an attention mask, logits of every position,
             their cross entropy at loss tokens; as many rows at a time as fit `--plain-tokens` padded tokens
    lightrl  SingleModel: one packed row, the output head at loss tokens only, entropies as well

`update` is forward, backward and optimizer step, `logprobs` a forward without gradient. MFU counts only what the model
needs for real tokens: the head at loss tokens, half of causal attention, nothing twice; it is the share of `--tflops`,
by default an H200's 989 for dense bfloat16 from its data sheet. `state_gib` is parameters, gradients and both moments;
`activations_gib` is what layers and head need, on paper; `memory_gib` is the measured peak of an update.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from benchmarks.lengths import skewed_lengths
from benchmarks.packing import GROUP_SIZE, make_experience, weighted_sum
from benchmarks.plan import MODELS
from benchmarks.report import Report, interleaved, median_ratio
from lightrl.experience import Experience
from lightrl.models import Outputs
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.strategies.costs import Work, peak_bytes
from lightrl.strategies.packed_attention import kernel_for
from lightrl.strategies.tensor_plans import layer_parameters

GOAL_RATIO, GOAL_MFU = 1.3, 0.45
TINY: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip


def make_config(name: str) -> PretrainedConfig:
    values = dict(TINY if name == "tiny" else MODELS[name])
    config: PretrainedConfig = AutoConfig.for_model(values.pop("model_type"), **values)
    return config


def flops(config: PretrainedConfig, lengths: Sequence[int], num_loss_tokens: int, *, has_backward: bool) -> float:
    """FLOPs of one pass over sequences of these lengths; a backward costs two forwards."""
    tokens = sum(lengths)
    layers = config.num_hidden_layers
    matrices = layers * layer_parameters(config) * tokens + config.vocab_size * config.hidden_size * num_loss_tokens
    # Scores and their product with the values: two products of T × T × heads · head size, half of them masked.
    attention = layers * config.num_attention_heads * config.head_dim * sum(length * length for length in lengths)
    return float((2 * matrices + 2 * attention) * (3 if has_backward else 1))


def make_parts(tokens: int, longest: int, vocab_size: int) -> Experience:
    """Groups of completions, about `tokens` tokens in total; prompts are a quarter of `longest`."""
    prompt = longest // 4
    num = max(1, round(tokens / (GROUP_SIZE * (prompt + longest / 4)))) * GROUP_SIZE
    return make_experience(prompt, skewed_lengths(num, longest), vocab_size)


def plain_logprobs(model: PreTrainedModel, part: Experience) -> Tensor:
    """[B, T], 0 at the first token."""
    width = int(part.lengths.max())
    token_ids = part.token_ids[:, :width]
    mask = torch.arange(width, device=token_ids.device) < part.lengths[:, None]
    logits = model(input_ids=token_ids, attention_mask=mask.long(), use_cache=False).logits[:, :-1].float()
    negative = torch.nn.functional.cross_entropy(logits.flatten(0, 1), token_ids[:, 1:].flatten(), reduction="none")
    return torch.nn.functional.pad(-negative.view(len(token_ids), -1), (1, 0))


def plain_parts(experience: Experience, max_tokens: int) -> list[Experience]:
    """Rows in order, as many at a time as `max_tokens` padded tokens hold."""
    rows = max(1, max_tokens // experience.token_ids.shape[1])
    return [
        experience.select(range(start, min(start + rows, len(experience)))) for start in range(0, len(experience), rows)
    ]


class Contest:
    """One model and one microbatch; each contender's update and logprobs."""

    def __init__(self, config: PretrainedConfig, experience: Experience, device: str, plain_tokens: int) -> None:
        torch.manual_seed(0)
        attention = "flash_attention_2" if has_flash_attention() and device == "cuda" else "sdpa"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        self.model: PreTrainedModel = model.eval()
        self.attention = attention
        self.device = device
        self.experience = experience.to(torch.device(device))
        self.plain = plain_parts(self.experience, plain_tokens)
        settings = LogprobSettings(entropy_needs_gradient=False)
        self.single = SingleModel(self.model, settings, form="packed" if device == "cuda" else None)
        self.kernel = attention
        if attention == "sdpa" and self.single.form == "packed":
            head_size = config.head_dim
            self.kernel = kernel_for(next(self.model.parameters()).device, dtype, head_size, head_size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)

    def update_plain(self) -> None:
        for part in self.plain:
            logprobs = plain_logprobs(self.model, part)
            weighted_sum(_cut(part), logprobs).backward()
        self._step()

    def update_lightrl(self) -> None:
        def loss(part: Experience, outputs: Outputs) -> Tensor:
            return weighted_sum(part, outputs.logprobs)

        self.single.forward_backward([self.experience], loss, Tensor.backward)
        self._step()

    @torch.no_grad()
    def score_plain(self) -> None:
        for part in self.plain:
            plain_logprobs(self.model, part)

    def score_lightrl(self) -> None:
        list(self.single.forward([self.experience]))

    def _step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, function: Callable[[], None]) -> Callable[[], float]:
        def run() -> float:
            self._wait()
            start = time.perf_counter()
            function()
            self._wait()
            return time.perf_counter() - start

        return run

    def peak_bytes(self, function: Callable[[], None]) -> int | None:
        """Peak memory of tensors while the function ran; None without a GPU."""
        if self.device != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        function()
        self._wait()
        return torch.cuda.max_memory_allocated()

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _cut(part: Experience) -> Experience:
    width = int(part.lengths.max())
    return part.with_tensors({"loss_mask": part.loss_mask[:, :width]})


def has_flash_attention() -> bool:
    from transformers.utils import is_flash_attn_2_available

    return bool(is_flash_attn_2_available())


def measure(report: Report, name: str, tokens: int, given: argparse.Namespace, device: str) -> dict[str, float]:
    config = make_config(name)
    experience = make_parts(tokens, given.longest, config.vocab_size)
    contest = Contest(config, experience, device, given.plain_tokens)
    lengths = experience.lengths.tolist()
    gib = 2**30
    state = sum(value.numel() * value.element_size() * 4 for value in contest.model.parameters())
    width = contest.model.dtype.itemsize
    work = Work(sum(lengths), checkpoint_activations=False, parameter_bytes=width, compute_bytes=width)
    activations = sum(peak_bytes(config, sum(lengths), config.num_hidden_layers, work))
    ratios: dict[str, float] = {}
    for what, plain, ours, has_backward in (
        ("update", contest.update_plain, contest.update_lightrl, True),
        ("logprobs", contest.score_plain, contest.score_lightrl, False),
    ):
        contenders = {"plain": plain, "lightrl": ours}
        peaks = {side: contest.peak_bytes(function) for side, function in contenders.items()}  # warms up, too
        timed = {side: contest.timed(function) for side, function in contenders.items()}
        seconds = interleaved(timed, repeats=given.repeats)
        work = flops(config, lengths, experience.num_loss_tokens, has_backward=has_backward)
        for side, times in seconds.items():
            middle = statistics.median(times)
            peak = peaks[side]
            report.add(
                what,
                model=name,
                contender=side,
                tokens=sum(lengths),
                tokens_per_s=round(sum(lengths) / middle),
                mfu=round(work / middle / (given.tflops * 1e12), 4),
                **({} if side == "plain" else median_ratio(seconds["plain"], times)),
                memory_gib=None if peak is None else round(peak / gib, 2),
                state_gib=round(state / gib, 2),
                activations_gib=round(activations / gib, 2),
                attention=contest.attention if side == "plain" else contest.kernel,
            )
        ratios[f"ratio_{name}_{tokens}_{what}"] = median_ratio(seconds["plain"], seconds["lightrl"])["ratio"]
    return ratios


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-0.6b,qwen3-1.7b")
    parser.add_argument("--tokens", default="4096,8192,16384", help="of a microbatch")
    parser.add_argument("--longest", type=int, default=1024, help="completion, in tokens")
    parser.add_argument("--plain-tokens", type=int, default=16384, help="padded tokens at a time of the plain loop")
    parser.add_argument("--tflops", type=float, default=989.0, help="of the GPU in bfloat16, dense")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny model, on the CPU if there is no GPU")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if given.quick:
        given.models, given.tokens, given.longest, given.plain_tokens, given.repeats = "tiny", "256", 32, 256, 1
    elif device == "cpu":
        raise SystemExit(
            "benchmarks.gpu_update needs an NVIDIA GPU, and torch finds none. Use --quick to try it on the CPU."
        )
    report = Report("gpu_update", dtype="bfloat16" if device == "cuda" else "float32", longest=given.longest)
    ratios: dict[str, float] = {}
    for name in given.models.split(","):
        for tokens in map(int, given.tokens.split(",")):
            ratios |= measure(report, name, tokens, given, device)
    report.finish(
        [
            "measurement", "model", "contender", "tokens", "tokens_per_s", "mfu", "ratio", "ratio_min", "ratio_max",
            "memory_gib", "state_gib", "activations_gib", "attention",
        ],
        **ratios, goal_ratio=GOAL_RATIO, goal_mfu=GOAL_MFU,
    )  # fmt: skip


if __name__ == "__main__":
    main()
