"""LocalEngine: generates in this process, with continuous batching, a decode thread and its own copy of the weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from lightrl.checks.bounds import check_bounds, check_choice, check_positive
from lightrl.checks.entry_points import entry_point
from lightrl.engines.engine import Completion, PlannedEngine, RolloutEngine, check_request, replaces_generate_alone
from lightrl.engines.local.decode_thread import DecodeThread
from lightrl.engines.local.decoder import Decoder, HuggingFaceDecoder
from lightrl.engines.local.running_batch import Row, RunningBatch, completion_seed
from lightrl.errors import EngineError, WeightSyncError
from lightrl.models import CONTEXT, context_tokens
from lightrl.models.model_spec import check_outputs
from lightrl.models.precision import computing_dtype
from lightrl.trajectory import Attached, Sampling
from lightrl.weights import Bucket, block_fp8


def copy_in(decoder: Decoder, buckets: Iterable[Bucket], *, can_undo: bool) -> None:
    """Copies every parameter into the decoder; on failure, restores the old values, if there are any (`can_undo`).

    Raises:
        WeightSyncError: if a name is unknown, missing or repeated, a shape differs, or a value is not finite.
    """
    loaded_names: set[str] = set()
    with contextlib.ExitStack() as undo:
        for bucket in buckets:
            for name, tensor in bucket.tensors.items():
                shape = decoder.shapes.get(name, decoder.optional_shapes.get(name))
                if shape is None:
                    raise WeightSyncError(
                        f"The engine's model has no parameter {name!r}; its parameter names look like "
                        f"{next(iter(decoder.shapes))!r}. Export the model that the engine was started with; the "
                        "engine keeps its old weights."
                    )
                if name in loaded_names:
                    raise WeightSyncError(f"Parameter {name!r} arrived twice. Fix the export.")
                if tensor.shape != shape:
                    raise WeightSyncError(
                        f"Parameter {name!r} has shape {tuple(tensor.shape)}, but the engine's model needs "
                        f"{tuple(shape)}. Export the model that the engine was started with; the engine keeps its old "
                        "weights."
                    )
            _check_values(bucket.tensors)
            for name, tensor in bucket.tensors.items():
                loaded_names.add(name)
                if can_undo:
                    undo.callback(decoder.write, name, decoder.read(name))
                decoder.write(name, tensor)
        missing = sorted(set(decoder.shapes) - loaded_names)
        if missing:
            raise WeightSyncError(
                f"{len(missing)} of {len(decoder.shapes)} parameters did not arrive, for example {missing[0]!r}. "
                "Export every parameter; the engine keeps its old weights."
            )
        undo.pop_all()


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    """Raises WeightSyncError if a value is not finite; reads from the device once for all tensors."""
    finite = {
        name: torch.stack(torch.aminmax(tensor.detach())).isfinite().all()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.numel()
    }
    for name, is_finite in zip(finite, torch.stack(list(finite.values())).tolist() if finite else (), strict=True):
        if not is_finite:
            raise WeightSyncError(
                f"Parameter {name!r} has values that are not finite. Find the update that produced them; the engine "
                "keeps its old weights."
            )


log = logging.getLogger(__name__)

# Measured on 2 cores with batch 64: a second thread slows a model of 1 M parameters from 6,789 to 3,610 tokens/s, but
# speeds up a model of 27 M parameters from 415 to 508 tokens/s.
SMALL_MODEL_PARAMETERS = 10_000_000


class LocalEngine(RolloutEngine):
    """A rollout engine in this process, on the trainer's GPU or the CPU, with its own copy of the weights.

    Llama, Mistral, Qwen2 and Qwen3 models are decoded on a fast path. Other decoder-only models that need a KV cache,
    or convolution and recurrent states, run Hugging Face's code, with a vision tower if they have one. All other models
    are refused. Both paths share the scheduler: rows wait in call order, enter free slots, and leave after their last
    token; equal prompts that are admitted together are computed once. A token depends on the seed, its position and the
    logits; the batch affects it only through float rounding of the logits, and has no effect with `max_batch=1`.

    `pause` sets a flag and `resume` clears it, so one resume ends any number of pauses. A paused engine queues
    requests, and `resume` admits them together, in call order. `pause` returns immediately on an idle engine. A weight
    load stops decoding without changing the flag.

    Memory: the weights; during a load also the old weights, to undo a bad bucket; and a KV cache for the largest number
    of rows and tokens so far. On a GPU, the fast path's KV cache is limited to `key_value_bytes`; rows beyond it wait.

    Args:
        max_batch: maximum number of completions decoded together (slots). None means 512 for models below 10 M
            parameters, where more rows hardly slow down a step, and 256 for others.
        threads: number of decoding threads; None means the number that torch uses in the thread that calls `start`.
            With the fast path's kernels, each thread decodes some of the rows. Otherwise torch's threads share each
            operation, which is slower than one thread for models below 10 M parameters; for these, None means 1.
        max_context: maximum number of tokens in prompt and completion together; None means the model's context.
        dtype: dtype of the engine's weights, for example `bfloat16`; `auto` means the trainer's computing dtype.
        device: where to decode; None means the trainer's CUDA device if it has one, and otherwise the CPU.
        quantization: `fp8` rounds linear weights as SGLang does with this setting. It saves no memory, but lets you see
            the mismatch with the trainer, and correct it, without a GPU. See weights/block_fp8.py.
        fast_path: False runs Hugging Face's code for every model.
        prefill_tokens: maximum number of prompt tokens, with padding, in one forward; limits the prefill's memory.
        record_routes: whether to return each token's experts, so that the trainer can also use them (models/routes.py).
            None does so for models with experts, except for families whose routes cannot be recorded.
        boundary_timeout_s: maximum wait of `pause` and `load_weights` for the current token and of `close` for a layer.
    """

    continues_completions = True
    reads_prompts = returns_topk = True
    probe_every_n_loads = 10  # with 0.8 M parameters, a probe takes 9 ms, 3% of a quickstart iteration

    def __init__(
        self,
        *,
        max_batch: int | None = None,
        threads: int | None = None,
        max_context: int | None = None,
        dtype: str = "auto",
        device: str | None = None,
        quantization: Literal["fp8"] | None = None,
        fast_path: bool = True,
        prefill_tokens: int = 8192,
        record_routes: bool | None = None,
        boundary_timeout_s: float = 120.0,
    ) -> None:
        check_bounds(1, max_batch=max_batch, prefill_tokens=prefill_tokens, threads=threads)
        check_bounds(2, max_context=max_context)
        check_positive(boundary_timeout_s=boundary_timeout_s)
        if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"dtype must be auto or a torch dtype such as float32 or bfloat16, got {dtype!r}.")
        check_choice(("fp8", None), quantization=quantization)
        self.max_batch = max_batch
        self.threads = threads
        self.max_context = max_context  # always a number after `start`
        self._given_max_context = max_context
        self.dtype = dtype
        self._given_device = device
        self.device = torch.device(device or "cpu")  # after `start`, the chosen device
        self.trainer_devices: Sequence[torch.device] = ()  # set before `start`
        self.quantization = quantization
        self.fast_path = fast_path
        self.prefill_tokens = prefill_tokens
        self.record_routes = record_routes
        self.boundary_timeout_s = boundary_timeout_s

        self.key_value_bytes: float | None = None  # set before `start`; None means half of the free GPU memory

        self._generates_each = replaces_generate_alone(self)
        self._decoder: Decoder | None = None
        self._dtype = torch.float32  # the policy's dtype, if known; after `start`, the engine's
        self._thread: DecodeThread | None = None
        self._vocab_size = 0

    def start(self, config: PretrainedConfig) -> None:
        """Builds the model without setting its weights, and starts the decode thread."""
        if self._thread is not None and (self._thread.is_alive() or self._decoder is not None):
            raise EngineError("LocalEngine is already started. Close it first, or create a new one.")
        check_outputs(config, "LocalEngine's model")
        text_config = config.get_text_config()
        model_context = context_tokens(config)
        if self._given_max_context is None:
            self.max_context = model_context if model_context is not None else 2**31 - 1
        elif model_context is not None and self._given_max_context > model_context:
            raise ValueError(f"max_context must be at most {model_context}, {CONTEXT}, got {self.max_context}.")
        if self.quantization is not None:
            block_fp8.quantized_config(config)  # checks the config
        self.choose_device()
        self.weight_version = -1
        self._vocab_size = text_config.vocab_size
        self._decoder = self._make_decoder(config)
        is_small = sum(shape.numel() for shape in self._decoder.shapes.values()) < SMALL_MODEL_PARAMETERS
        has_own_threads = self._decoder.has_own_threads
        if self.threads is None:
            self.threads = 1 if is_small and not has_own_threads else torch.get_num_threads()
        self._decoder.use_threads(self.threads)
        max_rows = self.max_batch or (512 if is_small else 256)
        if self.device.type == "cuda" and not is_small:
            log.warning("LocalEngine decodes on %s; SGLangEngine is faster for models of this size.", self.device)
        batch = RunningBatch(self._decoder, max_rows=max_rows, vocab_size=self._vocab_size, device=self.device)
        threads = 1 if is_small and has_own_threads else self.threads  # torch's intra-op threads
        self._thread = DecodeThread(batch, threads, self._decoder.ending, self.boundary_timeout_s)
        self._thread.start()

    def choose_device(self) -> torch.device:
        """Chooses the device to decode on from `device` and `trainer_devices`; `start` calls this."""
        if self._given_device is None and self.trainer_devices:
            first = self.trainer_devices[0]
            self.device = first if first.type == "cuda" else torch.device("cpu")
            if first.type not in ("cpu", "cuda"):
                log.warning("LocalEngine decodes on the CPU: its sampler needs float64, which %s lacks.", first.type)
        return self.device

    @property
    def records_columns(self) -> bool:
        return self.record_routes is not False

    def place(self, trainer_devices: Sequence[torch.device]) -> str:
        self.trainer_devices = trainer_devices
        return f"on {self.choose_device()}"

    def planned(self, trainer_device: torch.device, num_parameters: int) -> PlannedEngine:
        self.place([trainer_device])
        is_shared = self.device == trainer_device or self.device.type == "cpu" == trainer_device.type
        return PlannedEngine(
            "LocalEngine",
            "rank 0" if is_shared else "elsewhere",
            width=self._chosen_dtype().itemsize,
            max_rows=self.max_batch or (512 if num_parameters < SMALL_MODEL_PARAMETERS else 256),
        )

    def expect_policy(self, policy: PreTrainedModel, *, num_versions: int) -> None:
        self._dtype = next((value.dtype for value in policy.parameters()), self._dtype)

    def _chosen_dtype(self) -> torch.dtype:
        given: torch.dtype | None = None if self.dtype == "auto" else getattr(torch, self.dtype)
        return given or computing_dtype(self.trainer_precision, self._dtype)

    def take_memory(self, key_value_bytes: float, fraction: float) -> str:
        self.key_value_bytes = key_value_bytes
        return ""

    def queue_depths(self) -> dict[str, int]:
        return self._thread.queue_depths() if self._thread is not None else {"running": 0, "waiting": 0}

    async def generate(
        self,
        token_ids: list[int],
        sampling: Sampling,
        *,
        session: str,
        n: int = 1,
        started: Completion | None = None,
        **attached: Unpack[Attached],
    ) -> list[Completion]:
        """Generates `n` completions for one prompt; has no timeout, because the controller has one."""
        check_bounds(1, n=n)
        samplings = [sampling.with_seed(completion_seed(sampling.seed, sample)) for sample in range(n)]
        return list(await asyncio.gather(*self._submit(token_ids, samplings, [started] * n, attached)))

    def generate_group(
        self,
        token_ids: list[int],
        samplings: Sequence[Sampling],
        *,
        session: str,
        started: Sequence[Completion | None] | None = None,
        **attached: Unpack[Attached],
    ) -> list[asyncio.Future[Completion]]:
        """Submits one request for the whole group, unless a subclass overrides only `generate`."""
        if self._generates_each:
            return super().generate_group(token_ids, samplings, session=session, started=started, **attached)
        return self._submit(token_ids, samplings, started or [None] * len(samplings), attached)

    async def unfinished(self) -> dict[int, Completion]:
        return self._started().unfinished()

    async def pause(self) -> None:
        """Pauses; raises EngineTimeout, but stays paused, if the current token takes over `boundary_timeout_s`."""
        await self._started().pause()

    async def resume(self) -> None:
        self._started().resume()

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Stops decoding between two tokens, copies the buckets in the calling thread, and continues decoding.

        If `buckets` itself raises, the old weights are restored and the exception propagates.

        Raises:
            WeightSyncError: if a name is unknown, missing or repeated, a shape differs, or a value is not finite.
            EngineTimeout: if decoding does not stop within `boundary_timeout_s`; nothing is changed.
        """
        thread = self._started()
        if self.quantization is not None:
            rounded = ((bucket, block_fp8.dequantized(block_fp8.quantized(bucket.tensors))) for bucket in buckets)
            buckets = (replace(bucket, tensors=tensors) for bucket, tensors in rounded)
        with thread.held("load_weights"):
            assert self._decoder is not None
            copy_in(self._decoder, buckets, can_undo=self.weight_version >= 0)
            thread.take_version(weight_version)
            self.weight_version = weight_version

    def score(self, sequences: list[list[int]]) -> dict[str, list[list[float]]]:
        """Waits up to `boundary_timeout_s` for the current token, then scores. The only replica is `engine`."""
        return {"engine": [self._scores(token_ids) for token_ids in sequences]}

    def dtypes(self) -> set[str]:
        return {str(self._dtype).removeprefix("torch."), *(["float8_e4m3fn"] if self.quantization else [])}

    def read_weights(self) -> dict[str, Tensor]:
        """Returns copies of all parameters, keyed by Hugging Face name, to compare with the trainer's."""
        with self._started().held("read_weights"):
            assert self._decoder is not None
            return {name: self._decoder.read(name) for name in self._decoder.shapes}

    def close(self) -> None:
        """Stops decoding; raises EngineTimeout if the current layer takes over `boundary_timeout_s`."""
        if self._thread is not None:
            self._thread.close()
            self._decoder = None

    def _submit(
        self,
        token_ids: list[int],
        samplings: Sequence[Sampling],
        started: Sequence[Completion | None],
        attached: Attached,
    ) -> list[asyncio.Future[Completion]]:
        thread = self._started()
        longest = max(samplings, key=lambda sampling: sampling.max_new_tokens)
        check_request(token_ids, longest, len(samplings), vocab_size=self._vocab_size, max_context=self.max_context)
        # An error here fails only this request. A closed engine has no decoder, and its thread refuses the request.
        attachments = () if self._decoder is None else self._decoder.attachments(token_ids, **attached)
        prompt = tuple(token_ids)
        rows = zip(samplings, started, strict=True)
        return thread.submit([Row(prompt, sampling, attachments, start) for sampling, start in rows])

    def _scores(self, token_ids: list[int]) -> list[float]:
        chosen = torch.tensor(token_ids[1:], device=self.device)[:, None]
        return [0.0, *self.log_probabilities(token_ids).gather(1, chosen)[:, 0].tolist()]

    def log_probabilities(self, token_ids: list[int]) -> Tensor:
        with self._started().held("score"), torch.inference_mode():
            assert self._decoder is not None
            return torch.log_softmax(self._decoder.logits(token_ids[:-1]), -1)

    def _make_decoder(self, config: PretrainedConfig) -> Decoder:
        self._dtype = self._chosen_dtype()
        settings: dict[str, Any] = {"dtype": self._dtype, "device": self.device, "prefill_tokens": self.prefill_tokens}
        fast: Decoder | None = None
        if self.fast_path and not self.record_routes:
            fast = entry_point("fast decoder")(config, cache_bytes=self.key_value_bytes, **settings)
        return fast or HuggingFaceDecoder(config, record_routes=self.record_routes, **settings)

    def _started(self) -> DecodeThread:
        if self._thread is None:
            raise EngineError("LocalEngine is not started. Call start(config) first.")
        return self._thread
