"""Estimates a strategy's costs from a model's size: a rank's memory, bytes sent and microbatches.

`lightrl plan`, `launch` and `doctor run` use these formulas (lightrl/plan/memory.py adds a run's roles), and
`python -m benchmarks.plan` compares layouts; training does not use them. Bytes are for one rank in one update, tokens
for one update over all ranks. What autograd keeps is counted layer by layer, and tests/plan/test_costs.py compares it
with a real update on fake tensors; the bytes sent are a rough estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lightrl.functional.logprobs import are_few_logits, tokens_per_chunk
from lightrl.plan.sizes import LayerSize, ModelSize
from lightrl.strategies.parallel_3d import check_sizes, head_size, split_layers
from lightrl.strategies.sharded_experience.experience import TOKEN_BYTES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

USABLE_FRACTION = 0.9  # of a GPU's memory; the rest is not available for tensors
SERVED_BYTES = 2  # servers keep parameters in bfloat16
TRAJECTORY_BYTES = 8  # per token of a trajectory; rank 0 keeps them for the whole iteration

_WHOLE_BYTES = 8  # a gathered parameter and its gradient
_FLOAT, _INDEX = 4, 8  # bytes of a float32, and of an index


@dataclass(frozen=True)
class Work:
    """One update; the defaults are for bf16-mixed."""

    tokens: int  # of all ranks
    microbatch_tokens: int = 16384
    checkpoint_activations: bool = True
    parameter_bytes: int = 4  # also of a gradient, a moment of Adam, or a number in hidden states between layers
    compute_bytes: int = 2  # of a number in the matrix products of layers, or in parameters that FSDP2 gathers
    copies_weights: bool = False  # whether autocast keeps copies of them until the backward
    cp: int = 1  # ranks that share the tokens of a microbatch
    ep: int = 1  # ranks that each layer's experts are divided over
    is_compiled: bool = False  # torch.compile compiles the decoder layers
    stages: int = 1  # pipeline stages per rank; several make Interleaved1F1B


@dataclass(frozen=True)
class Cost:
    """The cost of one strategy at one size."""

    strategy: Literal["FSDP2", "3D"]
    pp: int
    dp: int
    tp: int
    num_microbatches: int  # per dp rank
    state_bytes: float  # parameters, gradients, moments
    gathered_bytes: float  # unsharded parameters, with 3D also their gradients
    activation_bytes: float  # what autograd keeps for the layers
    logit_bytes: float  # what the head needs at the start of the backward
    sent_dp: float  # to ranks with other trajectories
    sent_experts: float = 0.0  # the part of sent_dp that is of experts
    sent_tp: float = 0.0  # within layers, between the ranks that share them, their tokens or their experts
    sent_pp: float = 0.0  # between stages
    gradient_bytes: float = 0.0  # with FSDP2, unsharded: whole ones that wait, and a layer's while it is reduced
    reduce_every_microbatch: bool = False  # the setting of FSDP2Strategy

    @property
    def sent_bytes(self) -> float:
        return self.sent_dp + self.sent_tp + self.sent_pp

    @property
    def memory_bytes(self) -> float:
        gathered = self.gathered_bytes + self.gradient_bytes
        return self.state_bytes + gathered + self.activation_bytes + self.logit_bytes


def head_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """Returns the numbers of a head's query or key, and of its value, which differ in multi-head latent attention."""
    if getattr(config, "kv_lora_rank", None):
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim), int(config.v_head_dim)
    return head_size(config), head_size(config)


def key_value_bytes(config: PretrainedConfig, width: int = SERVED_BYTES) -> int:
    """Returns the bytes of one token in a decoder's cache, whose numbers have `width` bytes.

    Multi-head latent attention caches one latent vector and one rotated key for all heads.
    """
    if latent := getattr(config, "kv_lora_rank", None):
        return int(config.num_hidden_layers * (latent + config.qk_rope_head_dim)) * width
    return 2 * int(config.num_hidden_layers * config.num_key_value_heads * head_size(config)) * width


def key_value_ranks(config: PretrainedConfig, tp: int) -> int:
    """Returns over how many of a server's `tp` GPUs its key-values are divided; latent ones are on each."""
    return 1 if getattr(config, "kv_lora_rank", None) else min(tp, int(config.num_key_value_heads))


def experience_bytes(num_scores: int) -> int:
    """Returns the bytes of one token with `num_scores` float32 scores in an iteration's ShardedExperience."""
    return TOKEN_BYTES + _FLOAT * num_scores


def layer_bytes(size: ModelSize, layer: LayerSize, work: Work) -> int:
    """Returns the bytes that autograd keeps per token and layer, for Hugging Face's code and flash attention."""
    config, hidden = size.config, size.config.hidden_size
    is_gemma = config.model_type.startswith("gemma")  # its norms multiply by their weights in float32
    num_norms = 4 if is_gemma and config.model_type != "gemma" else 2
    parameter, compute = work.parameter_bytes, work.compute_bytes
    saved = _FLOAT * num_norms  # 1 / rms of each norm
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    key_size, value_size = head_sizes(config)
    query, key = heads * key_size, kv_heads * key_size
    normalizes_keys = "layers.*.self_attn.q_norm" in (config.base_model_tp_plan or {})  # and queries
    num_inputs = 3  # projections that read the layer's normalized input: q, k and v
    # Attention: queries, keys and values (after rope, which keeps only its angles), log-sum-exp, and the output, which
    # is the input of the output projection.
    if latent := getattr(config, "kv_lora_rank", None):
        num_inputs = 2
        output, ranks = heads * value_size, (latent, *filter(None, [config.q_lora_rank]))
        saved += compute * (2 * query + 2 * output) + _FLOAT * heads
        # a latent vector's norm keeps its float32 input and its normalized input; then comes a projection's input
        saved += sum((_FLOAT + 2 * compute) * rank + _FLOAT for rank in ranks)
        exchanged = output
    else:
        saved += compute * (2 * query + 2 * key) + _FLOAT * (heads + normalizes_keys * (heads + kv_heads))
        exchanged = query + 2 * key_size * (math.lcm(kv_heads, work.cp) - kv_heads)
    if work.cp > 1:  # also the output before its exchange, and the repeated heads of keys and values
        saved += compute * exchanged
    if work.is_compiled and not layer.experts:
        # The layer's input, and inputs and outputs of matrix products; the backward recomputes the rest.
        saved += parameter * hidden + compute * (2 + num_norms // 2) * hidden
        return int(saved + compute * (normalizes_keys * (query + key) + 3 * layer.width))
    # A norm keeps its input in float32 (no copy if it is float32 already), and the normalized input for the gradient
    # of its weight.
    saved += num_norms * (_FLOAT + (_FLOAT if is_gemma else parameter)) * hidden
    saved += normalizes_keys * (_FLOAT + (_FLOAT if is_gemma else compute)) * (query + key)
    # The input of q, k and v, and the input of gate and up; autocast makes a copy for each.
    num_inputs += 2 * (layer.width > 0)
    saved += compute * hidden * (2 if compute == parameter else num_inputs)
    # MLP: gate, its activation, up, and the product, which is the input of the down projection.
    return int(saved + compute * 4 * layer.width + _expert_bytes(size, layer, work))


def _expert_bytes(size: ModelSize, layer: LayerSize, work: Work) -> int:
    """Returns the bytes that autograd keeps per token for the routed experts of a layer, as grouped matrix products.

    With `ep`, they are those of the tokens that a rank receives, on average as many as it sends.
    """
    if not layer.experts:
        return 0
    hidden, compute = size.config.hidden_size, work.compute_bytes
    output = work.parameter_bytes if work.ep > 1 else compute  # before it is weighted
    each = compute * (hidden + 4 * layer.expert_width) + output * hidden
    indices = 4 * _INDEX  # indices of the chosen experts and of the sorted tokens
    # The router keeps its probabilities and its input: no autocast, and in some families float32 (a copy of bfloat16).
    is_float = compute != work.parameter_bytes or hasattr(size.config, "n_group")
    return int(size.used * (each + indices) + _FLOAT * (layer.experts + is_float * hidden))


def activation_bytes(size: ModelSize, tokens: int, share: float, work: Work) -> float:
    """Returns the bytes that autograd keeps for a microbatch after its forward, from the embedding to the last norm.

    A checkpointed layer keeps only its input. In the backward, one layer at a time also needs `layer_bytes`, which
    `peak_bytes` adds.

    Args:
        share: the layers that count, as a fraction of the model's; a pipeline's first stage may hold them repeatedly.
    """
    hidden = size.config.hidden_size
    last_norm = (_FLOAT + work.parameter_bytes) * hidden
    angles = 2 * work.parameter_bytes * (getattr(size.config, "qk_rope_head_dim", None) or head_size(size.config))
    if work.checkpoint_activations:
        saved = float(size.num_layers * work.parameter_bytes * hidden)
    else:
        saved = float(sum(layer.num * layer_bytes(size, layer, work) for layer in size.layers))
    copies = work.compute_bytes * size.in_layers if work.copies_weights else 0
    return float(tokens * (share * saved + last_norm + angles) + share * copies)


def logit_bytes(config: PretrainedConfig, tokens: int, work: Work) -> tuple[float, float]:
    """Returns the bytes that autograd keeps for the output head, and those that its backward allocates for a chunk."""
    vocabulary, compute = config.vocab_size, work.compute_bytes
    weights = vocabulary * config.hidden_size
    saved = compute * config.hidden_size * tokens  # the hidden states that predict tokens
    saved += compute * weights if compute != work.parameter_bytes else 0  # the head's copy under autocast
    if are_few_logits(tokens, vocabulary):  # autograd keeps their probabilities
        logits = tokens * vocabulary
        return float(saved + _FLOAT * logits), float((compute + 2 * _FLOAT) * logits)
    # Logits and their gradient in the head's dtype; intermediate results stay within a kernel.
    chunk = min(tokens, tokens_per_chunk(tokens, vocabulary, "fused")) * vocabulary * 2 * compute
    return float(saved), float(chunk + _FLOAT * weights + compute * config.hidden_size * tokens)


def peak_bytes(size: ModelSize, tokens: int, share: float, work: Work) -> tuple[float, float]:
    """Returns the bytes of layers and of logits when a microbatch uses most memory.

    This is at the start of the backward or, if layers are checkpointed, at the start of the last layer's backward.
    """
    saved, working = logit_bytes(size.config, tokens, work)
    layers = activation_bytes(size, tokens, share, work)
    largest = max(layer_bytes(size, layer, work) for layer in size.layers)
    again = tokens * largest if work.checkpoint_activations else 0.0
    return layers + max(0.0, again - working), saved + working


def fsdp2_cost(size: ModelSize, gpus: int, work: Work, *, reduce_every_microbatch: bool = False) -> Cost:
    """Estimates the cost of FSDP2Strategy, which gathers layers in the forward and backward of each microbatch.

    It keeps whole gradients until the last microbatch, or reduces them after each with `reduce_every_microbatch`. With
    `ep`, a rank gathers only its own experts, and each token's hidden state travels to its experts and back.
    """
    config, ep = size.config, work.ep
    num = _num_microbatches(work, gpus / work.cp)
    # two gathers per microbatch
    each = work.compute_bytes * 2 * num + work.parameter_bytes * (num if reduce_every_microbatch else 1)
    tokens = math.ceil(min(work.microbatch_tokens, math.ceil(work.tokens * work.cp / gpus)) / work.cp)
    heads = config.num_attention_heads + math.lcm(config.num_key_value_heads, work.cp)
    num_passes = 3 if work.checkpoint_activations else 2
    exchanged = work.compute_bytes * size.num_layers * heads * sum(head_sizes(config)) * (work.cp - 1) / work.cp
    routed = sum(layer.num for layer in size.layers if layer.experts) * size.used
    exchanged += work.parameter_bytes * routed * 2 * config.hidden_size * (ep - 1) / ep  # there and back
    layers, logits = peak_bytes(size, tokens, 1.0, work)
    waiting = work.parameter_bytes * size.gathered(ep) if num > 1 and not reduce_every_microbatch else 0
    largest = max(layer.gathered(ep) for layer in size.layers)
    return Cost(
        strategy="FSDP2",
        pp=1,
        dp=gpus,
        tp=1,
        num_microbatches=num,
        state_bytes=4 * work.parameter_bytes * size.parameters / gpus,
        # The embedding and the head are gathered in their dtype. One layer is computed while the next one is gathered.
        gathered_bytes=work.compute_bytes * 2 * largest + work.parameter_bytes * size.ends,
        # Gradients are computed in the layers' dtype, and reduced in that of the parameters.
        gradient_bytes=waiting + (work.compute_bytes + work.parameter_bytes) * largest,
        activation_bytes=layers,
        logit_bytes=logits,
        sent_dp=each * size.received(gpus, ep),
        sent_experts=each * size.received_experts(gpus, ep),
        sent_tp=num_passes * work.tokens / gpus * exchanged,
        reduce_every_microbatch=reduce_every_microbatch,
    )


def parallel_3d_cost(size: ModelSize, pp: int, dp: int, tp: int, work: Work) -> Cost:
    """Estimates the cost of Parallel3DStrategy; tp communicates in every layer.

    A pipeline keeps its parameters gathered over dp within an update. Without a pipeline, layers are freed after each
    forward, gathered again for the backward and kept for the next forward.
    Raises ValueError if the model cannot be split this way.
    """
    config = size.config
    check_sizes(config, pp, tp, "1F1B" if work.stages == 1 else "Interleaved1F1B", work.stages)
    num = _num_microbatches(work, dp)
    tokens = min(work.microbatch_tokens, math.ceil(work.tokens / dp))
    ends = config.vocab_size * config.hidden_size
    parts = split_layers(config, pp * work.stages)
    layers = [sum(map(len, parts[rank::pp])) for rank in range(pp)]
    held = [count * size.in_layers / size.num_layers for count in layers]
    held[0] += ends
    held[-1] += ends if pp > 1 or not config.tie_word_embeddings else 0
    largest = max(held) / tp
    sent_dp = whole = _WHOLE_BYTES * largest
    if pp == 1:
        in_layers = size.in_layers / tp
        sent_dp += 4 * num * in_layers
        waiting = 4 * largest if num > 1 else 0  # whole gradients
        whole = waiting + _WHOLE_BYTES * (2 * in_layers / layers[0] + largest - in_layers)
    sent_dp *= (dp - 1) / dp
    hidden = work.compute_bytes * tokens * config.hidden_size
    sent_tp = 8 * hidden * (tp - 1) / tp * max(layers) * num
    sent_pp = 2 * hidden / tp * num * work.stages if pp > 1 else 0.0
    # Microbatches on the first rank; interleaved schedules start more (https://arxiv.org/abs/2205.05198, 4.2).
    in_flight = min(num, pp + (pp - 1) / work.stages if work.stages > 1 else pp)
    activations, logits = peak_bytes(size, tokens, in_flight * max(layers) / size.num_layers, work)
    return Cost(
        strategy="3D",
        pp=pp,
        dp=dp,
        tp=tp,
        num_microbatches=num,
        state_bytes=4 * work.parameter_bytes * largest / dp,
        gathered_bytes=whole if dp > 1 else 0.0,
        activation_bytes=activations / tp,
        logit_bytes=logits / tp,
        sent_dp=sent_dp,
        sent_tp=sent_tp,
        sent_pp=sent_pp,
    )


def _num_microbatches(work: Work, dp: float) -> int:
    return max(1, math.ceil(work.tokens / dp / work.microbatch_tokens))
