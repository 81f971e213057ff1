"""The fake server's answers with a model: a LocalEngine, its weights from a Hugging Face folder."""

import asyncio
import base64
import functools
import hashlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from fake_sglang.faults import Fault
from fake_sglang.layout import checksums
from fake_sglang.script import Refused, Run, ScriptedModel, die
from fake_sglang.wrong_loads import LoadHistory, Tensors
from lightrl.engines.engine import Completion
from lightrl.engines.local.decoder import HuggingFaceDecoder
from lightrl.engines.local.local_engine import LocalEngine
from lightrl.errors import EngineError
from lightrl.functional.supports import decode_supports
from lightrl.trajectory import Sampling
from lightrl.weights import BroadcastGroup, Bucket
from lightrl.weights.bucket import OUTPUT_HEAD

ALL_TOKENS = 2**30  # SGLang's top_k without a bound
_SHARED_WITH_DRAFT = ("model.embed_tokens.weight", OUTPUT_HEAD)


class DraftModel:
    """A draft model as EAGLE's in SGLang 0.5.23: the target's own embedding and head, and a layer that no load reaches.

    It has checksums and drafts nothing.
    """

    def __init__(self) -> None:
        self.own = {"model.fc.weight": torch.ones(4, 8)}
        self.target: Callable[[], dict[str, Tensor]] = dict  # the target's parameters

    def parameters(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.target().items() if name in _SHARED_WITH_DRAFT} | self.own


class EmbeddedModel(ScriptedModel):
    """A tiny model, decoded in pieces of a few tokens: an abort takes effect between two pieces.

    The seed of a piece follows from the request's seed and the piece's place in prompt and completion, so tokens do not
    depend on other requests. As with SGLang, a request aborted while paused loses the tokens of its current piece.

    Args:
        folder: a Hugging Face model folder; random weights if it has none.
        piece_tokens: per piece.
        dtype: of its weights.
        num_ranks: whose shares of the weights its checksums tell; it computes without ranks.
        draft: whose checksums it tells too.
    """

    takes_tensors = True

    def __init__(
        self,
        folder: str,
        *,
        version: str = "default",
        piece_tokens: int = 16,
        dtype: str = "float32",
        num_ranks: int = 1,
        draft: DraftModel | None = None,
    ) -> None:
        config = AutoConfig.from_pretrained(folder)
        self.piece_tokens = piece_tokens
        self._versions = {0: version}  # names of the engine's numbers
        self._dtype = dtype
        self._num_ranks = num_ranks
        self._history: LoadHistory | None = None
        self._stale: LocalEngine | None = None  # with the weights of stale key-values
        self._engine = self._make_engine(config)
        super().__init__(
            vocab_size=int(config.vocab_size), max_context=int(self._engine.max_context or 2**20), version=version
        )
        self.config = config
        self.draft = draft
        if draft is not None:
            draft.target = self._engine.read_weights
        eos = config.eos_token_id
        self.eos_token_ids = frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
        if list(Path(folder).glob("*.safetensors")):
            tensors = {name: tensor for file in self._read(folder) for name, tensor in file.items()}
        else:
            tensors = dict(AutoModelForCausalLM.from_config(config).named_parameters())
        if getattr(config, "tie_word_embeddings", False):
            tensors.pop("lm_head.weight", None)
        self._engine.load_weights([Bucket(tensors, is_last=True)], weight_version=0)
        self._adapters: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {}  # config and tensors, by name
        self._adapted: dict[str, LocalEngine] = {}  # the base with an adapter beside it, by name

    def load_adapter(self, name: str, config: Any, payload: str, checksums: Any) -> None:
        tensors = dict(unpacked(payload))
        sums = {
            key: hashlib.sha256(value.view(torch.uint8).numpy().tobytes()).hexdigest() for key, value in tensors.items()
        }
        if checksums is not None and sums != checksums:
            die("RuntimeError: [LORA-CHECK] adapter sync MISMATCH")
        self._adapters[name] = (config, tensors)
        engine = self._make_engine(self.config, fast_path=False)
        try:
            engine.load_weights([Bucket(self._engine.read_weights(), is_last=True)], weight_version=0)
            self._add_adapter(engine, name)
        except (EngineError, RuntimeError, KeyError, AttributeError) as error:
            engine.close()
            del self._adapters[name]
            raise Refused(f"{error}") from error
        self._adapted[name] = engine

    def copy_adapter(self, source: str, target: str) -> int:
        old, new = self._adapters[source][1], self._adapters[target][1]
        self._adapters[target] = self._adapters[source]
        return sum(int((old[name] != tensor).sum()) for name, tensor in new.items())

    def unload_adapter(self, name: str) -> None:
        del self._adapters[name]
        self._adapted.pop(name).close()

    def _add_adapter(self, engine: LocalEngine, name: str) -> None:
        """Adds B A x to what each adapted layer gives, in the server's dtype, as SGLang does: nothing is merged."""
        decoder = engine._decoder
        assert isinstance(decoder, HuggingFaceDecoder)

        def adapt(module: torch.nn.Module, args: tuple[Tensor], output: Tensor, key: str) -> Tensor:
            config, tensors = self._adapters[name]
            down, up = (tensors[one].to(output.dtype) for one in (key, key.replace(".lora_A.", ".lora_B.")))
            change = args[0] @ down.T @ up.T
            scaling: float = config["lora_alpha"] / config["r"]
            return output + scaling * change

        tensors = self._adapters[name][1]
        for key in (key for key in tensors if ".lora_A." in key):
            layer = key.removeprefix("base_model.model.").partition(".lora_A.")[0]
            module = decoder._model.get_submodule(layer)
            shape = (len(tensors[key.replace(".lora_A.", ".lora_B.")]), tensors[key].shape[1])
            if module.weight.shape != shape:
                raise RuntimeError(f"{layer} has shape {tuple(module.weight.shape)} instead of the adapter's {shape}")
            module.register_forward_hook(functools.partial(adapt, key=key))

    def _engine_of(self, lora: str | None) -> LocalEngine:
        return self._engine if lora is None else self._adapted[lora]

    def _make_engine(self, config: PretrainedConfig, *, fast_path: bool = True) -> LocalEngine:
        engine = LocalEngine(max_batch=64, threads=1, dtype=self._dtype, fast_path=fast_path)
        engine.start(config)
        return engine

    def keep_history(self) -> None:
        if self._history is None:
            self._history = LoadHistory(self._engine.read_weights())

    def forget_history(self) -> None:
        self._history = None

    def keep_stale(self) -> None:
        if self._stale is None:
            self._stale = self._make_engine(self.config)
            self._stale.load_weights([Bucket(self._engine.read_weights(), is_last=True)], weight_version=0)

    def forget_stale(self) -> None:
        if self._stale is not None:
            self._stale.close()
        self._stale = None

    async def revert(self, fault: Fault) -> None:
        versions = self._history.versions
        self._put(versions[max(0, len(versions) - 1 - fault.versions_back)], self.version)
        fault.num_wrong_values += self._history.num_wrong(self._engine.read_weights())

    def rename(self, version: str) -> None:
        self.version = self._versions[self._engine.weight_version] = version

    async def write(self, run: Run) -> Literal["stop", "length", "abort"]:
        params = run.params
        if int(params["max_new_tokens"]) == 0:
            return "length"
        stops = () if params["ignore_eos"] else tuple(sorted({*(params["stop_token_ids"] or ()), *self.eos_token_ids}))
        top_k = int(params["top_k"])
        seed = int(params["sampling_seed"] if params.get("sampling_seed") is not None else 42)
        sampling = Sampling(
            temperature=params["temperature"] if params["temperature"] >= 1e-6 else 0.0,
            top_p=params["top_p"],
            top_k=-1 if top_k < 1 or top_k >= ALL_TOKENS else top_k,
            max_new_tokens=int(params["max_new_tokens"]),
            stop_token_ids=stops,
        )
        while (written := len(run.token_ids)) < sampling.max_new_tokens:
            if run.is_aborted:
                return "abort"
            size = min(self.piece_tokens, sampling.max_new_tokens - written)
            piece = replace(
                sampling,
                max_new_tokens=size,
                min_new_tokens=max(0, min(size, int(params["min_new_tokens"]) - written + run.minimum_from)),
                seed=_mixed(seed, len(run.prompt) + written),
            )
            engine = self._stale if run.is_stale and self._stale is not None else self._engine_of(run.lora)
            (completion,) = await engine.generate(run.prompt + run.token_ids, piece, session=run.rid)
            run.token_ids += completion.token_ids
            run.logprobs += completion.logprobs
            if run.supports is not None and "supports" in completion.columns:
                run.supports += self._masks(completion)
            run.versions += [  # under an adapter those of the base
                self._versions[number] if engine is self._engine else self.version
                for number in completion.weight_versions
            ]
            if completion.finish_reason == "stop":
                return "stop"
        return "length"

    def _masks(self, completion: Completion) -> list[list[int]]:
        is_every, counts, ids = decode_supports(np.asarray(completion.columns["supports"]))
        others = np.split(ids, counts.cumsum()[:-1])
        return [
            list(range(self.vocab_size)) if every else [token, *more.tolist()]
            for token, every, more in zip(completion.token_ids, is_every.tolist(), others, strict=True)
        ]

    def score(self, token_ids: list[int], lora: str | None = None) -> list[float]:
        return self._engine_of(lora).score([token_ids])["engine"][0]

    def top_logprobs(self, token_ids: list[int], num: int) -> list[list[tuple[float, int]]]:
        rows = self._engine.log_probabilities(token_ids)
        logprobs, ids = rows.topk(min(num, rows.shape[1]), dim=1)
        return [[], *(list(zip(*pair, strict=True)) for pair in zip(logprobs.tolist(), ids.tolist(), strict=True))]

    async def pause(self) -> None:
        for engine in [self._engine, *self._adapted.values()]:
            await engine.pause()

    async def resume(self) -> None:
        for engine in [self._engine, *self._adapted.values()]:
            await engine.resume()

    async def load_folder(self, folder: str, version: str | None, fault: Fault | None = None) -> None:
        files = await asyncio.to_thread(self._read, folder)
        await asyncio.to_thread(self._load, files, version, fault)

    async def load_tensors(
        self, tensors: Iterable[tuple[str, Tensor]], version: str | None, fault: Fault | None = None
    ) -> None:
        await asyncio.to_thread(self._load, [dict(tensors)], version, fault)

    def checksums(self) -> list[dict[str, str]]:
        ranks = checksums(self._engine.read_weights(), self.config, self._num_ranks)
        if self.draft is not None:
            drafts = checksums(self.draft.parameters(), self.config, self._num_ranks)
            for rank, draft in zip(ranks, drafts, strict=True):
                rank |= {f"draft.{name}": digest for name, digest in draft.items()}
        return ranks

    def _load(self, files: Sequence[Tensors], version: str | None, fault: Fault | None) -> None:
        """As SGLang: what is missing stays, what is unknown is ignored, and another shape ends the process."""
        held = self._engine.read_weights()
        loaded = {name: tensor for file in files for name, tensor in file.items()}
        for name in loaded.keys() & held.keys():
            if (sent := loaded[name].shape) != held[name].shape:
                die(f"{name} has shape {list(sent)} instead of {list(held[name].shape)}")
        if self._history is not None:
            loaded = self._history.load(files, held, fault, is_last=version is not None)
        self._put(
            {name: loaded.get(name, tensor) for name, tensor in held.items()},
            self.version if version is None else version,
        )
        if self._history is not None and fault is not None:
            fault.num_wrong_values += self._history.num_wrong(self._engine.read_weights())

    def _put(self, tensors: Tensors, version: str) -> None:
        number = self._engine.weight_version + 1
        self._versions[number] = version
        try:
            self._engine.load_weights([Bucket(tensors, is_last=True)], weight_version=number)
        except EngineError as error:
            raise Refused(f"{error} Rolling back.") from error
        self.version = version
        self.num_loads = number
        for engine in self._adapted.values():
            engine.load_weights([Bucket(tensors, is_last=True)], weight_version=number)

    def _read(self, folder: str) -> list[Tensors]:
        """The tensors of each file."""
        tensors: list[Tensors] = []
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise Refused(f"{folder} has no safetensors file.")
        for file in files:
            try:
                tensors.append(load_file(file))
            except (SafetensorError, OSError) as error:
                raise Refused(f"{file} cannot be read: {error}") from error
        return tensors


class RewardModel(ScriptedModel):
    """A tiny reward model from a Hugging Face folder, one row at a time; it generates by rule."""

    def __init__(self, folder: str, *, version: str = "default") -> None:
        self._model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        config = self._model.config
        super().__init__(
            vocab_size=int(config.vocab_size),
            max_context=int(getattr(config, "max_position_embeddings", None) or 2**20),
            version=version,
        )

    def classify(self, rows: Sequence[list[int]]) -> list[list[float]]:
        with torch.inference_mode():
            hidden = [self._model.base_model(input_ids=torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
            return [self._model.score(state).tolist() for state in hidden]


def joined_group(body: dict[str, Any]) -> BroadcastGroup:
    """Blocks until the trainer has joined too."""
    return BroadcastGroup(
        body["master_address"],
        int(body["master_port"]),
        rank=int(body["rank_offset"]),
        world_size=int(body["world_size"]),
        name=body["group_name"],
        backend=body.get("backend", "nccl"),
    )


def received(group: BroadcastGroup, body: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Blocks until the trainer has broadcast all tensors."""
    forms = zip(body["shapes"], body["dtypes"], strict=True)
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in forms]
    group.broadcast(tensors)
    return list(zip(body["names"], tensors, strict=True))


def unpacked(payload: str) -> list[tuple[str, Tensor]]:
    """The tensors of one of `serialized_named_tensors` (`flattened_bucket`); the unpickler accepts only tensors."""
    content = _TensorUnpickler(io.BytesIO(base64.b64decode(payload))).load()
    flat = content["flattened_tensor"]
    return [
        (entry.name, flat[entry.start_idx : entry.end_idx].clone().view(entry.dtype).view(entry.shape))
        for entry in content["metadata"]
    ]


class _TensorUnpickler(pickle.Unpickler):
    """With an allow-list, as SGLang's."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda content: torch.load(io.BytesIO(content), weights_only=True)
        if (module, name) == ("torch", "Tensor"):
            return torch.Tensor
        if (module, name) in {("types", "SimpleNamespace"), ("collections", "OrderedDict"), ("torch", "Size")}:
            return {"SimpleNamespace": SimpleNamespace, "OrderedDict": OrderedDict, "Size": torch.Size}[name]
        is_rebuild = name.startswith(("_rebuild", "rebuild_"))
        if (is_rebuild and module in ("torch._utils", "torch.multiprocessing.reductions")) or (
            module == "torch"
            and (name.endswith(("Storage", "int8")) or isinstance(getattr(torch, name, 0), torch.dtype))
        ):
            return super().find_class(module, name)
        if module == "torch.storage" and name in ("TypedStorage", "UntypedStorage"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not on the allow-list")


def _mixed(seed: int, offset: int) -> int:
    """int64."""
    digest = hashlib.blake2b(f"{seed}/{offset}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
