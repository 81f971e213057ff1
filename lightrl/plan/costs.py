"""Estimates a strategy's costs from a model's size: a rank's memory, bytes sent and microbatches.

`lightrl plan`, `launch` and `doctor run` use these formulas (lightrl/plan/memory.py applies them to roles), and
`python -m benchmarks.plan` compares layouts; training does not use them. Bytes are per rank and update; tokens are per
update, over all ranks. The tensors that autograd saves are counted layer by layer; tests/plan/test_costs.py compares
the counts with a real update on fake tensors. The bytes sent are a rough estimate.
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

USABLE_FRACTION = 0.9  # share of a GPU's memory; the rest is not available for tensors
SERVED_BYTES = 2  # servers keep parameters in bfloat16
TRAJECTORY_BYTES = 8  # per token; rank 0 keeps the trajectories for the whole iteration

_WHOLE_BYTES = 8  # per gathered parameter, including its gradient
_FLOAT, _INDEX = 4, 8  # bytes of a float32, and of an index


@dataclass(frozen=True)
class Work:
    """One update; the defaults are for bf16-mixed."""

    tokens: int  # over all ranks
    microbatch_tokens: int = 16384
    checkpoint_activations: bool = True
    parameter_bytes: int = 4  # per parameter, gradient, Adam moment, and element of the hidden states between layers
    compute_bytes: int = 2  # per element in the layers' matrix products, and per parameter that FSDP2 gathers
    copies_weights: bool = False  # whether autocast keeps copies of the weights until the backward
    cp: int = 1  # ranks that share the tokens of a microbatch
    ep: int = 1  # ranks over which each layer's experts are divided
    is_compiled: bool = False  # torch.compile compiles the decoder layers
    stages: int = 1  # pipeline stages per rank; more than one means Interleaved1F1B


@dataclass(frozen=True)
class Cost:
    """The cost of a strategy with these sizes."""

    strategy: Literal["FSDP2", "3D"]
    pp: int
    dp: int
    tp: int
    num_microbatches: int  # per dp rank
    state_bytes: float  # parameters, gradients, moments
    gathered_bytes: float  # unsharded parameters; in 3D also their gradients
    activation_bytes: float  # saved by autograd for the layers
    logit_bytes: float  # needed by the head at the start of the backward
    sent_dp: float  # to ranks with other trajectories
    sent_experts: float = 0.0  # the experts' part of sent_dp
    sent_tp: float = 0.0  # within layers, between the ranks that share a layer, its tokens or its experts
    sent_pp: float = 0.0  # between stages
    gradient_bytes: float = 0.0  # FSDP2's unsharded gradients, both waiting and being reduced
    reduce_every_microbatch: bool = False  # the setting of FSDP2Strategy

    @property
    def sent_bytes(self) -> float:
        return self.sent_dp + self.sent_tp + self.sent_pp

    @property
    def memory_bytes(self) -> float:
        gathered = self.gathered_bytes + self.gradient_bytes
        return self.state_bytes + gathered + self.activation_bytes + self.logit_bytes


def head_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """Returns the size of a head's query or key, and of its value; they differ in multi-head latent attention."""
    if getattr(config, "kv_lora_rank", None):
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim), int(config.v_head_dim)
    return head_size(config), head_size(config)


def key_value_bytes(config: PretrainedConfig, width: int = SERVED_BYTES) -> int:
    """Returns how many bytes one token takes in the KV cache, at `width` bytes per element."""
    if latent := getattr(config, "kv_lora_rank", None):  # one latent vector and one rotated key serve all heads
        return int(config.num_hidden_layers * (latent + config.qk_rope_head_dim)) * width
    return 2 * int(config.num_hidden_layers * config.num_key_value_heads * head_size(config)) * width


def key_value_ranks(config: PretrainedConfig, tp: int) -> int:
    """Returns how many of a server's `tp` GPUs share its KV cache; latent attention replicates the cache instead."""
    return 1 if getattr(config, "kv_lora_rank", None) else min(tp, int(config.num_key_value_heads))


def experience_bytes(num_scores: int) -> int:
    """Returns how many bytes a token with `num_scores` float32 scores takes in an iteration's ShardedExperience."""
    return TOKEN_BYTES + _FLOAT * num_scores


def layer_bytes(size: ModelSize, layer: LayerSize, work: Work) -> int:
    """Returns the bytes that autograd saves per token in this layer, with Hugging Face's code and flash attention."""
    config, hidden = size.config, size.config.hidden_size
    is_gemma = config.model_type.startswith("gemma")  # its norms multiply by their weights in float32
    num_norms = 4 if is_gemma and config.model_type != "gemma" else 2
    parameter, compute = work.parameter_bytes, work.compute_bytes
    saved = _FLOAT * num_norms  # 1 / rms of each norm
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    key_size, value_size = head_sizes(config)
    query, key = heads * key_size, kv_heads * key_size
    normalizes_keys = "layers.*.self_attn.q_norm" in (config.base_model_tp_plan or {})  # queries too
    num_inputs = 3  # projections that read the layer's normalized input: q, k and v
    # Attention saves queries, keys and values (after rope, which saves only its angles), log-sum-exp, and the output,
    # which is the input of the output projection.
    if latent := getattr(config, "kv_lora_rank", None):
        num_inputs = 2
        output, ranks = heads * value_size, (latent, *filter(None, [config.q_lora_rank]))
        saved += compute * (2 * query + 2 * output) + _FLOAT * heads
        # A latent vector's norm saves its float32 input and its normalized input; the next projection saves its input.
        saved += sum((_FLOAT + 2 * compute) * rank + _FLOAT for rank in ranks)
        exchanged = output
    else:
        saved += compute * (2 * query + 2 * key) + _FLOAT * (heads + normalizes_keys * (heads + kv_heads))
        exchanged = query + 2 * key_size * (math.lcm(kv_heads, work.cp) - kv_heads)
    if work.cp > 1:  # attention also saves its output before the exchange, and the repeated heads of keys and values
        saved += compute * exchanged
    if work.is_compiled and not layer.experts:
        # A compiled layer saves its input, and inputs and outputs of matrix products; the backward recomputes the rest.
        saved += parameter * hidden + compute * (2 + num_norms // 2) * hidden
        return int(saved + compute * (normalizes_keys * (query + key) + 3 * layer.width))
    # A norm saves its input in float32 (not copied if it is float32 already), and the normalized input for the
    # gradient of its weight.
    saved += num_norms * (_FLOAT + (_FLOAT if is_gemma else parameter)) * hidden
    saved += normalizes_keys * (_FLOAT + (_FLOAT if is_gemma else compute)) * (query + key)
    # The q, k and v projections share one saved input, gate and up another; autocast copies it for each projection.
    num_inputs += 2 * (layer.width > 0)
    saved += compute * hidden * (2 if compute == parameter else num_inputs)
    # The MLP saves gate, its activation, up, and their product, which is the input of the down projection.
    return int(saved + compute * 4 * layer.width + _expert_bytes(size, layer, work))


def _expert_bytes(size: ModelSize, layer: LayerSize, work: Work) -> int:
    """Returns the bytes that autograd saves per token for a layer's routed experts, with grouped matrix products.

    With `ep`, a rank saves them for the tokens that it receives, which are on average as many as it sends.
    """
    if not layer.experts:
        return 0
    hidden, compute = size.config.hidden_size, work.compute_bytes
    output = work.parameter_bytes if work.ep > 1 else compute  # per element of an expert's output, before weighting
    each = compute * (hidden + 4 * layer.expert_width) + output * hidden
    indices = 4 * _INDEX  # indices of the chosen experts and of the sorted tokens
    # The router saves its probabilities and, if autocast is on or the model casts to float32, a float32 input.
    is_float = compute != work.parameter_bytes or hasattr(size.config, "n_group")
    return int(size.experts_per_token * (each + indices) + _FLOAT * (layer.experts + is_float * hidden))


def activation_bytes(size: ModelSize, tokens: int, share: float, work: Work) -> float:
    """Returns the bytes that autograd saves in a microbatch's forward, from the embedding to the last norm.

    A checkpointed layer saves only its input; `peak_bytes` adds the `layer_bytes` that its backward recomputes.

    Args:
        share: layers to count, as a fraction of the model's; a pipeline's first stage counts each microbatch in flight.
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
    """Returns the bytes that autograd saves for the output head, and the bytes that a chunk's backward allocates."""
    vocabulary, compute = config.vocab_size, work.compute_bytes
    weights = vocabulary * config.hidden_size
    saved = compute * config.hidden_size * tokens  # the hidden states that predict tokens
    saved += compute * weights if compute != work.parameter_bytes else 0  # autocast's copy of the head
    if are_few_logits(tokens, vocabulary):  # autograd saves their probabilities
        logits = tokens * vocabulary
        return float(saved + _FLOAT * logits), float((compute + 2 * _FLOAT) * logits)
    # A chunk has logits and their gradient in the head's dtype; intermediate results stay within a kernel.
    chunk = min(tokens, tokens_per_chunk(tokens, vocabulary, "fused")) * vocabulary * 2 * compute
    return float(saved), float(chunk + _FLOAT * weights + compute * config.hidden_size * tokens)


def peak_bytes(size: ModelSize, tokens: int, share: float, work: Work) -> tuple[float, float]:
    """Returns the bytes of layers and of logits at a microbatch's memory peak, the start of the backward."""
    saved, working = logit_bytes(size.config, tokens, work)
    layers = activation_bytes(size, tokens, share, work)
    largest = max(layer_bytes(size, layer, work) for layer in size.layers)
    recomputed = tokens * largest if work.checkpoint_activations else 0.0  # at the start of the last layer's backward
    return layers + max(0.0, recomputed - working), saved + working


def fsdp2_cost(size: ModelSize, gpus: int, work: Work, *, reduce_every_microbatch: bool = False) -> Cost:
    """Estimates the cost of FSDP2Strategy, which gathers layers in the forward and backward of each microbatch.

    It keeps whole gradients until the last microbatch or, with `reduce_every_microbatch`, reduces them after each. With
    `ep`, a rank gathers only its own experts, and each token's hidden state is sent to its experts and back.
    """
    ep = work.ep
    num = _num_microbatches(work, gpus / work.cp)
    # each microbatch gathers twice
    num_reductions = num if reduce_every_microbatch else 1
    sent_per_parameter = work.compute_bytes * 2 * num + work.parameter_bytes * num_reductions
    tokens = math.ceil(min(work.microbatch_tokens, math.ceil(work.tokens * work.cp / gpus)) / work.cp)
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
        # The embedding and the head are gathered in their own dtype. A layer is computed while the next is gathered.
        gathered_bytes=work.compute_bytes * 2 * largest + work.parameter_bytes * size.outside_layers,
        # Gradients are computed in the layers' dtype and reduced in the parameters' dtype.
        gradient_bytes=waiting + (work.compute_bytes + work.parameter_bytes) * largest,
        activation_bytes=layers,
        logit_bytes=logits,
        sent_dp=sent_per_parameter * size.received(gpus, ep),
        sent_experts=sent_per_parameter * size.received_experts(gpus, ep),
        sent_tp=work.tokens / gpus * _exchanged_bytes(size, work),
        reduce_every_microbatch=reduce_every_microbatch,
    )


def _exchanged_bytes(size: ModelSize, work: Work) -> float:
    """Returns the bytes sent per token in all layers and passes, between cp ranks and to the token's experts."""
    config, cp, ep = size.config, work.cp, work.ep
    num_passes = 3 if work.checkpoint_activations else 2
    heads = config.num_attention_heads + math.lcm(config.num_key_value_heads, cp)
    exchanged: float = work.compute_bytes * size.num_layers * heads * sum(head_sizes(config)) * (cp - 1) / cp
    routed = sum(layer.num for layer in size.layers if layer.experts) * size.experts_per_token
    exchanged += work.parameter_bytes * routed * 2 * config.hidden_size * (ep - 1) / ep  # there and back
    return num_passes * exchanged


def parallel_3d_cost(size: ModelSize, pp: int, dp: int, tp: int, work: Work) -> Cost:
    """Estimates the cost of Parallel3DStrategy; raises ValueError if the model cannot be split this way.

    A pipeline keeps its parameters gathered over dp during an update. Without a pipeline, layers are freed after each
    forward, gathered again for the backward and kept for the next forward. tp communicates in every layer, and divides
    all parameters but the experts, which ep divides over all ranks of a stage.
    """
    config, ep = size.config, work.ep
    check_sizes(config, pp, tp, "1F1B" if work.stages == 1 else "Interleaved1F1B", work.stages)
    num = _num_microbatches(work, dp)
    tokens = math.ceil(min(work.microbatch_tokens, math.ceil(work.tokens / dp)) / work.cp)
    shards = dp * work.cp
    expert_shards = shards * tp / ep if ep > 1 else shards  # without ep, each tp rank has all experts
    ends = config.vocab_size * config.hidden_size
    parts = split_layers(config, pp * work.stages, size.in_layers / size.num_layers)
    layers = [sum(map(len, parts[rank::pp])) for rank in range(pp)]
    others = (size.in_layers - size.expert_parameters) / size.num_layers
    held = [count * others for count in layers]
    held[0] += ends
    held[-1] += ends if pp > 1 or not config.tie_word_embeddings else 0
    in_layer = size.expert_parameters / size.num_layers / ep
    stage = max(range(pp), key=lambda rank: held[rank] / tp + layers[rank] * in_layer)
    experts = layers[stage] * in_layer
    largest = held[stage] / tp + experts
    state = held[stage] / tp / shards + experts / expert_shards
    whole = _WHOLE_BYTES * largest
    of_layers = of_experts = 0.0  # gathered again for each microbatch
    if pp == 1:
        of_layers, of_experts = 4 * num * size.num_layers * others / tp, 4 * num * experts
        in_layers = size.num_layers * others / tp + experts
        waiting = 4 * largest if num > 1 else 0  # whole gradients
        whole = waiting + _WHOLE_BYTES * (2 * in_layers / layers[0] + largest - in_layers)
    sent_experts = (_WHOLE_BYTES * experts + of_experts) * (1 - 1 / expert_shards)
    sent_dp = sent_experts + (_WHOLE_BYTES * held[stage] / tp + of_layers) * (1 - 1 / shards)
    hidden = work.compute_bytes * tokens * config.hidden_size
    sent_tp = 8 * hidden * (tp - 1) / tp * max(layers) * num
    sent_tp += work.tokens / (shards * tp) * _exchanged_bytes(size, work) * max(layers) / size.num_layers
    sent_pp = 2 * hidden / tp * num * work.stages if pp > 1 else 0.0
    # The first rank's microbatches; interleaved schedules start more (https://arxiv.org/abs/2205.05198, section 4.2).
    in_flight = min(num, pp + (pp - 1) / work.stages if work.stages > 1 else pp)
    activations, logits = peak_bytes(size, tokens, in_flight * max(layers) / size.num_layers, work)
    return Cost(
        strategy="3D",
        pp=pp,
        dp=dp,
        tp=tp,
        num_microbatches=num,
        state_bytes=4 * work.parameter_bytes * state,
        gathered_bytes=whole if max(shards, expert_shards) > 1 else 0.0,
        activation_bytes=activations / tp,
        logit_bytes=logits / tp,
        sent_dp=sent_dp,
        sent_experts=sent_experts,
        sent_tp=sent_tp,
        sent_pp=sent_pp,
    )


def _num_microbatches(work: Work, dp: float) -> int:
    return max(1, math.ceil(work.tokens / dp / work.microbatch_tokens))
