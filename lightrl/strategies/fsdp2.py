"""FSDP2Strategy: parameters, gradients and optimizer state spread over all ranks; the same numbers as one process.

Each decoder layer of each role's model is gathered when it is needed and freed afterwards (`fully_shard`), so a rank
holds its share and one or two layers. Models are born without memory; rank 0 reads the checkpoint tensor by tensor and
every rank keeps its part.

    world 8, num_replicas 2:   replica 0: ranks 0 1 2 3, each a quarter of the model
                               replica 1: ranks 4 5 6 7, the same; gradients are averaged over both
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint as checkpoint_activations

from lightrl.checks.disk_errors import cause_to_show
from lightrl.models import ParallelModel, RoleMesh
from lightrl.strategies.checkpoint import (
    META_FILE,
    BackgroundWrites,
    SafeLoadPlanner,
    check_folder,
    load_optimizer_state,
    optimizer_state,
    publish,
    remove_checkpoint,
    write_error,
)
from lightrl.strategies.checkpoint_fit import check_optimizer_names, check_weights
from lightrl.strategies.empty_model import empty_models, fill_model, role_of
from lightrl.strategies.fsdp2_model import FSDP2Model
from lightrl.strategies.ranks import ProcessRanks, Ranks, nearest_divisors, watch_all
from lightrl.strategies.role_mesh import (
    CONTROL_TIMEOUT,
    OtherRanksModel,
    Place,
    check_meshes,
    empty_out,
    make_place,
    role_meshes,
)
from lightrl.strategies.single import LogprobSettings

if TYPE_CHECKING:
    import lightning as L
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


class ShardedMixedPrecision(Precision):
    """`bf16-mixed` by FSDP2 itself: parameters travel and compute in bfloat16, gradients are summed in float32."""

    precision = "bf16-mixed"


class FSDP2Strategy(ModelParallelStrategy):
    """Data parallelism with sharded models, for an RLModule: `Trainer(devices=8, strategy=FSDP2Strategy())`.

    Every role's model is sharded, trained or not: over all ranks, or over those of its `Role.mesh`. Precision is
    the Trainer's: `bf16-mixed` keeps float32 shards and computes in bfloat16, `bf16-true` keeps bfloat16 only. Gradient
    clipping is the Trainer's too.

    Args:
        num_replicas: copies of the model, each sharded over `world size / num_replicas` ranks (hybrid sharding). With
            the nodes' number there, parameters are gathered within a node and only gradients cross.
        reshard_after_forward: free a layer's parameters after its forward and gather them again for its backward. False
            keeps them: faster, and the whole model in memory between forward and backward.
        activation_checkpointing: keep each layer's input only and compute the layer again in the backward.
        offload_to_cpu: shards, gradients and optimizer state live in CPU memory.
        reduce_every_microbatch: reduce gradients after each microbatch instead of once per minibatch: less memory, as
            no rank keeps whole gradients, and more communication.
        compile_layers: `torch.compile` each decoder layer.
        hang_timeout_s: the run ends if a rank waits so long for another, which is named.
        save_async: training goes on while a checkpoint is written, from a copy in CPU memory. An error is raised by the
            next save or at the end of the run.
    """

    def __init__(
        self,
        *,
        num_replicas: int = 1,
        reshard_after_forward: bool = True,
        activation_checkpointing: bool = False,
        offload_to_cpu: bool = False,
        reduce_every_microbatch: bool = False,
        compile_layers: bool = False,
        hang_timeout_s: float = 600.0,
        save_async: bool = False,
    ) -> None:
        super().__init__(tensor_parallel_size=1)
        if num_replicas < 1:
            raise ValueError(f"num_replicas={num_replicas}, expected at least 1. Raise it.")
        if hang_timeout_s <= 0:
            raise ValueError(f"hang_timeout_s={hang_timeout_s}, expected seconds above 0. Raise it.")
        self.num_replicas = num_replicas
        self.reshard_after_forward = reshard_after_forward
        self.activation_checkpointing = activation_checkpointing
        self.offload_to_cpu = offload_to_cpu
        self.reduce_every_microbatch = reduce_every_microbatch
        self.compile_layers = compile_layers
        self.hang_timeout_s = hang_timeout_s
        self.save_async = save_async
        self._writes = BackgroundWrites()
        self._save_group: Any = None  # of the thread that writes: the main one has its own collectives meanwhile
        self.ranks = Ranks()
        self._mesh: DeviceMesh | None = None
        self._places: dict[tuple[str, RoleMesh], Place] = {}  # of roles with a mesh of their own

    # ------------------------------------------------------------------ sizes and processes

    @property
    def dp_size(self) -> int:
        """Ranks that the trajectories are shared out over; known before any process starts."""
        return self.num_processes * self.num_nodes

    def check_sizes(self, module: L.LightningModule | None = None) -> None:
        """Refuses sizes that do not fit, before a device is touched.

        Raises:
            ValueError: with the numbers and the nearest that fit.
        """
        world = self.num_processes * self.num_nodes
        if world % self.num_replicas:
            raise ValueError(
                f"num_replicas={self.num_replicas} does not divide the {world} processes (devices={self.num_processes}"
                f" × num_nodes={self.num_nodes}), expected one of its divisors. Set it to "
                f"{' or '.join(map(str, nearest_divisors(world, self.num_replicas)))}."
            )
        given = self._lightning_module if module is None else module
        check_meshes(given, world)
        for role, mesh in role_meshes(given).items():
            if mesh.pp * mesh.tp > 1:
                raise ValueError(
                    f"The {role} has mesh={mesh}, expected pp=1 and tp=1 with FSDP2Strategy, which shards over all "
                    "ranks of a mesh. Leave them out, or use Parallel3DStrategy."
                )

    def _prepare_environment(self) -> None:
        """Refuses what cannot be spread, before processes meet, and sets what Lightning's set-up reads."""
        self.check_sizes()
        if not hasattr(self.lightning_module, "parallel_models"):
            raise ValueError(
                f"{type(self).__name__} got a {type(self.lightning_module).__name__}, expected an RLModule, whose "
                "models it splits. Use Lightning's ModelParallelStrategy or ddp for other modules."
            )
        if self._process_group_backend is None and self.root_device.type == "cuda":
            self._process_group_backend = "cpu:gloo,cuda:nccl"
        self._data_parallel_size = self.num_processes * self.num_nodes

    def setup_environment(self) -> None:
        self._prepare_environment()
        if self.precision_plugin.precision == "bf16-mixed":
            self.precision_plugin = ShardedMixedPrecision()
        super().setup_environment()
        destroy_groups_at_exit()
        self._save_group = dist.new_group(backend="gloo")
        self._mesh = self._make_mesh()
        self.ranks = self._all_ranks(self.device_mesh["data_parallel"].get_group())

    def _all_ranks(self, dp_group: Any) -> ProcessRanks:
        assert self.cluster_environment is not None
        control_group = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        return ProcessRanks(
            dp_group=dp_group,
            control_group=control_group,
            device=self.root_device,
            watch=watch_all(
                control_group,
                main_address=self.cluster_environment.main_address,
                hang_timeout_s=self.hang_timeout_s,
            ),
        )

    def on_exception(self, exception: BaseException) -> None:
        self.ranks.fail(exception)

    def teardown(self) -> None:
        try:
            self._writes.wait()
        finally:
            self.ranks.close()
            super().teardown()

    def _make_mesh(self) -> DeviceMesh:
        """What models are sharded over: one axis, or (replicas, shards)."""
        if self.num_replicas == 1:
            return self.device_mesh["data_parallel"]
        sizes = (self.num_replicas, self.world_size // self.num_replicas)
        return init_device_mesh(self.root_device.type, sizes, mesh_dim_names=("replica", "shard"))

    # ------------------------------------------------------------------ models

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Inside, models of a Role have no memory yet: `setup` gives them their shards."""
        with super().tensor_init_context(empty_init), empty_models():
            yield

    def setup(self, trainer: L.Trainer) -> None:
        self._spread_models()
        vars(self.precision_plugin)["clip_grad_by_norm"] = self._clip_by_norm
        super().setup(trainer)

    def _spread_models(self) -> None:
        """Splits each model of the module where it belongs, and takes it out of the other ranks."""
        assert self.lightning_module is not None
        assert isinstance(self.ranks, ProcessRanks)
        places: dict[str, Place] = {}
        for role, mesh in role_meshes(self.lightning_module).items():
            if (role, mesh) not in self._places:
                self._places[role, mesh] = self._make_place(mesh)
            places[role] = self._places[role, mesh]
        if "policy" in places:
            places["value_head"] = places["policy"]  # a critic's, on its body
        self.ranks.roles = {role: place.ranks for role, place in places.items()}
        for name, model in self.lightning_module.named_children():
            if not any(True for _ in model.parameters()):
                continue
            if name in places and not places[name].ranks.is_here:
                empty_out(model)
            elif not self._is_split(model):
                self._check_part(name, model)
                self.shard(model, places.get(name))

    def _make_place(self, mesh: RoleMesh) -> Place:
        members = mesh.ranks(self.world_size)
        assert isinstance(self.ranks, ProcessRanks)
        return make_place(self.ranks, members, [len(members)], ["dp"], self.root_device)

    def _is_split(self, model: torch.nn.Module) -> bool:
        return isinstance(model, FSDPModule)

    def _check_part(self, name: str, model: torch.nn.Module) -> None:
        """Refuses a part of the module that cannot be split."""

    def shard(self, model: torch.nn.Module, place: Place | None = None) -> None:
        """Shards a model in place, layer by layer, and loads the weights if it has none yet; collective.

        Args:
            model: whole, or without memory.
            place: where; all ranks if None.
        """
        ranks = self.ranks if place is None else place.ranks
        settings: dict[str, Any] = {
            "mesh": self._mesh if place is None else place.mesh,
            "mp_policy": self._mixed_precision(),
            "offload_policy": CPUOffloadPolicy() if self._offloads else OffloadPolicy(),
        }
        for layer in decoder_layers(model):
            trains = any(parameter.requires_grad for parameter in layer.parameters())
            if self.compile_layers:
                layer.forward = torch.compile(layer.forward)
            if self.activation_checkpointing and trains:
                layer.forward = functools.partial(checkpoint_activations, layer.forward, use_reentrant=False)
            fully_shard(layer, reshard_after_forward=self.reshard_after_forward, **settings)
        # The root's own parameters (embedding, last norm, head) are read outside of its forward, by the logprobs.
        fully_shard(model, reshard_after_forward=False, **settings)
        role = role_of(model)
        if role is not None:
            home = torch.device("cpu") if self._offloads else self.root_device
            fill_model(model, role, home, is_main=ranks.is_main)

    @property
    def _offloads(self) -> bool:
        return self.offload_to_cpu and self.root_device.type != "cpu"

    def _mixed_precision(self) -> MixedPrecisionPolicy:
        if self.precision_plugin.precision == "bf16-mixed":
            return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return MixedPrecisionPolicy()

    def model_to_device(self) -> None:
        if not self._offloads:
            super().model_to_device()
            return
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.root_device))

    def parallel_model(
        self,
        model: PreTrainedModel,
        settings: LogprobSettings,
        *,
        role: str = "policy",
        value_head: torch.nn.Linear | None = None,
    ) -> ParallelModel:
        """The ParallelModel of a role's model that `setup` has sharded."""
        ranks = self.ranks.of_role(role)
        return self._model_here(model, settings, ranks, value_head) if ranks.is_here else OtherRanksModel()

    def _model_here(
        self, model: PreTrainedModel, settings: LogprobSettings, ranks: Ranks, value_head: torch.nn.Linear | None
    ) -> ParallelModel:
        return FSDP2Model(
            model,
            settings,
            ranks=ranks,
            value_head=value_head,
            reduce_every_microbatch=self.reduce_every_microbatch,
            is_offloaded=self._offloads,
        )

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """As Lightning's, which warns of a rank that holds none of the parameters."""
        parameters = [value for group in optimizer.param_groups for value in group["params"]]
        if parameters:
            torch.nn.utils.clip_grad_norm_(parameters, clip_val)

    # ------------------------------------------------------------------ checkpoints

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        assert self.model is not None
        return optimizer_state(self.model, optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """A folder, written beside its place and renamed when every rank has written its part.

        Raises:
            OSError: if it cannot be written, or an earlier one could not in the background.
        """
        place = Path(self.broadcast(str(filepath)))
        part = place.with_name(f"{place.name}.part")
        state = {"state_dict": checkpoint.pop("state_dict")}
        for index, optimizer in enumerate(checkpoint.pop("optimizer_states", [])):
            state[f"optimizer_{index}"] = optimizer
        state = {name: part for name, part in state.items() if part}  # a rank may hold nothing
        rest = io.BytesIO()
        torch.save(checkpoint, rest)

        def write() -> None:
            try:
                if self.is_global_zero:
                    remove_checkpoint(part)
                    part.mkdir(parents=True)
                    (part / META_FILE).write_bytes(rest.getbuffer())
                dist.barrier(group=self._save_group)  # else a rank that is ahead makes the folder first
                dcp.state_dict_saver.save(state, checkpoint_id=part, process_group=self._save_group)
                if self.is_global_zero:  # all have written: the last thing that a save does is a reduction
                    publish(part, place)
            except (OSError, RuntimeError, CheckpointException) as error:
                if self.is_global_zero:
                    shutil.rmtree(part, ignore_errors=True)
                raise write_error(error, place, "that all ranks share") from cause_to_show(error)

        if self.save_async:
            if self.root_device.type == "cpu":  # elsewhere it is a copy already
                state = tree_map_only(Tensor, torch.clone, state)
            self._writes.add(write)
            return
        write()
        self.barrier()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            self._writes.remove(filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Weights and optimizers into place, from however many ranks; gives the rest. Roles not saved stay as loaded.

        Raises:
            ValueError: if the folder is not whole, or of other models or optimizers.
        """
        self._writes.wait()
        path = Path(self.broadcast(str(checkpoint_path)))
        check_folder(path)
        assert self.model is not None
        saved = FileSystemReader(str(path)).read_metadata().state_dict_metadata
        state: dict[str, Any] = get_model_state_dict(self.model)
        present = {name: value for name, value in state.items() if f"state_dict.{name}" in saved}
        trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        # Frozen roles do not travel with it, and other ranks may have models that this one has not.
        needed = {name: value.shape for name, value in state.items() if name in trained | present.keys()}
        sizes = {name: getattr(saved[f"state_dict.{name}"], "size", needed[name]) for name in present}
        check_weights(sizes, needed, path)
        self._read(path, {"state_dict": present})
        self.model.load_state_dict(present, strict=False)
        for index, optimizer in enumerate(self.optimizers):
            key = f"optimizer_{index}"
            states = {key: optimizer_state(self.model, optimizer)}
            there = {name.removeprefix(f"{key}.") for name in saved if name.startswith(f"{key}.")}
            check_optimizer_names(there, states[key], optimizer, path)
            self._read(path, states)
            load_optimizer_state(self.model, optimizer, states[key], path)
        rest: dict[str, Any] = torch.load(path / META_FILE, weights_only=True)
        return rest

    def _read(self, path: Path, state: dict[str, Any]) -> None:
        """Fills in the tensors of a state, in place; collective, also for a rank that has none."""
        state = {name: part for name, part in state.items() if part}
        dcp.state_dict_loader.load(state, checkpoint_id=str(path), planner=SafeLoadPlanner())


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated layers of a Hugging Face model: the modules whose classes it must not split; none of another kind.

    Raises:
        ValueError: if the model does not name them.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers and hasattr(model, "config"):
        raise ValueError(
            f"{type(model).__name__} names no decoder layers, expected _no_split_modules as Hugging Face models have. "
            "Use such a model with FSDP2Strategy."
        )
    return layers


@functools.cache
def destroy_groups_at_exit() -> None:
    """Groups live as long as the process, for several fits; left alone, gloo's threads abort it at its end."""

    def destroy() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    atexit.register(destroy)
