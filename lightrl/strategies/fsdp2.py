"""FSDP2Strategy: shards parameters, gradients and optimizer state over all ranks; same results as one process.

Each decoder layer is gathered when it is needed and freed afterwards (`fully_shard`), so a rank holds its shards and
one or two whole layers. Models are built without weights; each rank reads its shards from the checkpoint.

    world 8, num_replicas 2:   replica 0: ranks 0 1 2 3, each with a quarter of the model
                               replica 1: ranks 4 5 6 7, likewise; gradients are averaged over both
    and ep 2:                  ranks 0 2 share the first half of each layer's experts, ranks 1 3 the second
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint as checkpoint_activations
from transformers import PreTrainedModel

from lightrl.checks.bounds import check_bounds, check_positive
from lightrl.checks.files import check_local
from lightrl.concurrency.owner import own_mark
from lightrl.models import ParallelModel, RoleMesh, models_made_by, recompute_contexts, wrap_blocks
from lightrl.models.conversion import conversions
from lightrl.models.expert_parallel import expert_mesh, num_split_experts, shard_experts, split_experts
from lightrl.models.moe import moe_blocks, router_of
from lightrl.models.optimizer import model_children, own_parameters
from lightrl.strategies.checkpoint.atomic_write import BackgroundWrites, logged_behind_failure
from lightrl.strategies.checkpoint.folder import folder_writer, load_folder, optimizer_state
from lightrl.strategies.empty_model import empty_model, fill_model, take_role
from lightrl.strategies.fsdp2_model import FSDP2Model, cp_refused
from lightrl.strategies.head import LogprobSettings
from lightrl.strategies.layouts.packing_trial import refuses_packing
from lightrl.strategies.layouts.probes import LAYER_DTYPE, compiles, decoder_layers, may_be_cut
from lightrl.strategies.offload import HOST, OFFLOADABLE, Offloadable, StateCopies, move_state, offload_activations
from lightrl.strategies.precision import ClipsByStrategy, subclassed
from lightrl.strategies.ranks.processes import (
    START_TIMEOUT,
    ProcessRanks,
    Ranks,
    allow_long_waits,
    nearest_divisors,
    watch_all,
)
from lightrl.strategies.ranks.role_mesh import (
    OtherRanksModel,
    Place,
    check_meshes,
    empty_out,
    make_place,
    planned_roles,
    role_meshes,
)
from lightrl.strategies.ranks.shared_folder import check_all_see

EXIT_S = 5.0  # how long to wait for gloo's threads when the process exits


class FSDP2Strategy(ModelParallelStrategy):
    """Data parallelism with sharded models, for an RLModule: `Trainer(devices=8, strategy=FSDP2Strategy())`.

    Shards every role's model, trained or not, over all ranks or over its `Role.mesh`. The Trainer sets precision and
    gradient clipping. `bf16-mixed` is autocast as in one process, with float32 shards and hidden states. Layers are
    gathered in bfloat16, so norm weights are also rounded. `bf16-true` keeps everything in bfloat16.

    Args:
        num_replicas: number of copies of the model, each sharded over `world size / num_replicas` ranks (hybrid
            sharding). With one copy per node, parameters are gathered within a node; only gradients cross nodes.
        ep: number of ranks over which each MoE layer's experts are divided. A rank gathers only its own experts, and
            tokens are sent to the ranks of their experts. Must divide the number of experts and the ranks of a replica.
            Needs torch >= 2.11, without compile_layers, parameters in offload_to_cpu, 16-mixed or role meshes.
        cp: number of ranks that share each microbatch's tokens, for long trajectories; attention exchanges heads. Must
            divide the ranks and the attention heads. Needs models that can be packed, and no role meshes.
        reshard_after_forward: free a layer's parameters after its forward pass, and gather them again for its backward
            pass. False is faster, but keeps the whole model in memory between the two.
        activation_checkpointing: keep only each layer's input, and recompute the layer in the backward pass.
        offload_to_cpu: data to keep in CPU memory: `parameters` (shards, gradients and optimizer state; updates run on
            the CPU), `optimizer` (its state between updates), `activations` (saved by each layer for its backward pass;
            few with activation_checkpointing). A GPU waits while activations are copied, and computes while state is.
        reduce_every_microbatch: reduce gradients after each microbatch instead of once per minibatch. This saves
            memory, because no rank keeps whole gradients, but costs communication.
        compile_layers: `torch.compile` each decoder layer. None compiles on NVIDIA GPUs, except for models with experts
            (compiled layers cannot replay the engine's choice of experts) or states (models/hybrids.py).
        hang_timeout_s: end the run if a rank waits this long for another rank, which the error names. Before training,
            while models are loaded, the limit is at least 25 minutes.
        save_async: continue training while a checkpoint is written from a copy in CPU memory. If the write fails, the
            next save or the end of the run raises the error.
    """

    def __init__(
        self,
        *,
        num_replicas: int = 1,
        ep: int = 1,
        cp: int = 1,
        reshard_after_forward: bool = True,
        activation_checkpointing: bool = False,
        offload_to_cpu: Sequence[Offloadable] = (),
        reduce_every_microbatch: bool = False,
        compile_layers: bool | None = None,
        hang_timeout_s: float = 600.0,
        save_async: bool = False,
    ) -> None:
        super().__init__(tensor_parallel_size=1)
        check_bounds(1, num_replicas=num_replicas, ep=ep, cp=cp)
        check_positive(hang_timeout_s=hang_timeout_s)
        if isinstance(offload_to_cpu, bool | str) or set(offload_to_cpu) - set(OFFLOADABLE):
            raise ValueError(f"offload_to_cpu must be a list of {', '.join(OFFLOADABLE)}, got {offload_to_cpu!r}.")
        self.num_replicas = num_replicas
        self.ep = ep
        self.cp = cp
        self.reshard_after_forward = reshard_after_forward
        self.activation_checkpointing = activation_checkpointing
        self.offload_to_cpu = offload_to_cpu
        self.reduce_every_microbatch = reduce_every_microbatch
        self.compile_layers = compile_layers
        self.hang_timeout_s = hang_timeout_s
        self.save_async = save_async
        self._writes = BackgroundWrites()
        self._save_group: dist.ProcessGroup | None = None  # only for the thread that writes checkpoints
        self.ranks = Ranks()
        self._mesh: DeviceMesh | None = None
        self._expert_mesh: DeviceMesh | None = None  # with ep
        self._context_group: dist.ProcessGroup | None = None  # with cp
        self._places: dict[tuple[str, RoleMesh], Place] = {}  # only roles with a mesh have one

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.ranks.dp_size, "rank": self.ranks.dp_rank}

    def check_sizes(self, module: L.LightningModule | None = None) -> None:
        """Raises ValueError for sizes that do not fit, and names the nearest sizes that do. Needs no device."""
        world = self.num_processes * self.num_nodes
        processes = f"processes (devices={self.num_processes} × num_nodes={self.num_nodes})"
        _check_divides("num_replicas", self.num_replicas, {processes: world})
        module = self.lightning_module if module is None else module
        check_meshes(module, world)
        for planned in planned_roles(module).values():
            if planned.spec.quantization is not None and (self.ep > 1 or "parameters" in self.offload_to_cpu):
                raise ValueError(
                    "FSDP2Strategy does not support ep or parameters in offload_to_cpu with a model with "
                    f"quantization={planned.spec.quantization!r}. Remove that setting, or remove quantization."
                )
        for role, mesh in role_meshes(module).items():
            if mesh.pp * mesh.tp > 1:
                raise ValueError(
                    f"The {role} has mesh={mesh}, but FSDP2Strategy only shards over all ranks of a mesh. Remove pp "
                    "and tp, or use Parallel3DStrategy."
                )
        if self.ep > 1:
            self._check_ep(module, {"ranks of a replica": world // self.num_replicas})
        if self.cp > 1:
            self._check_cp(module, {"ranks": world})

    def _check_ep(self, module: L.LightningModule | None, ranks: dict[str, int]) -> None:
        settings = {
            "compile_layers=true": self.compile_layers,
            "parameters in offload_to_cpu": "parameters" in self.offload_to_cpu,
            "trainer.precision='16-mixed'": self.precision_plugin.precision == "16-mixed",
            "the mesh of a role": role_meshes(module),
        }
        if refused := [name for name, is_set in settings.items() if is_set]:
            raise ValueError(f"ep={self.ep} does not support {' or '.join(refused)} yet. Remove that, or set ep to 1.")
        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise ValueError(f"ep={self.ep} needs torch >= 2.11, got {torch.__version__}. Install it, or set ep to 1.")
        specs = {name: role.spec for name, role in planned_roles(module).items() if role.spec.url is None}
        experts = {f"experts of the {name}": num_split_experts(spec.load_config()) for name, spec in specs.items()}
        _check_divides("ep", self.ep, {**ranks, **experts})
        if experts and not any(experts.values()):
            raise ValueError(f"ep={self.ep} divides experts, but no model in this run has any. Set ep to 1.")

    def _check_cp(self, module: L.LightningModule | None, numbers: dict[str, int], tp: int = 1) -> None:
        roles = planned_roles(module)
        if role_meshes(module) or (module is not None and not roles):
            raise ValueError(
                f"cp={self.cp} needs one of lightrl's modules (GRPO, SFT, …) whose roles have no mesh, got "
                f"{type(module).__name__}. Remove the meshes, or set cp to 1."
            )
        for name, spec in ((name, role.spec) for name, role in roles.items() if role.spec.url is None):
            config = spec.load_config()
            may_pack = may_be_cut(config) and not refuses_packing(spec.load_config(), has_logits=spec.head != "scalar")
            if spec.attn_implementation not in (None, "sdpa") or not may_pack:
                raise cp_refused(self.cp, config.model_type)
            place = f"{name} on a tensor rank" if tp > 1 else name
            numbers[f"attention heads of the {place}"] = config.get_text_config().num_attention_heads // tp
        _check_divides("cp", self.cp, numbers)

    def setup_environment(self) -> None:
        """Starts communication between the processes, after all checks that do not need it."""
        self.check_sizes()
        module = self.lightning_module
        if not hasattr(module, "parallel_models"):
            raise ValueError(
                f"{type(self).__name__} can only train lightrl's modules, got a {type(module).__name__}. For other "
                "modules, use Lightning's ModelParallelStrategy or ddp."
            )
        if self.process_group_backend is None and self.root_device.type == "cuda":
            self._process_group_backend = "cpu:gloo,cuda:nccl"
        self._data_parallel_size = self.num_processes * self.num_nodes
        super().setup_environment()
        destroy_groups_at_exit()
        control_group = dist.new_group(backend="gloo", timeout=START_TIMEOUT)
        assert self.cluster_environment is not None
        address = self.cluster_environment.main_address
        watch = watch_all(control_group, main_address=address, hang_timeout_s=self.hang_timeout_s)
        self._save_group = dist.new_group(backend="gloo", timeout=START_TIMEOUT)
        dp_group = self._make_mesh()
        for group in (self._save_group, control_group):
            allow_long_waits(group)
        self.ranks = ProcessRanks(dp_group=dp_group, control_group=control_group, device=self.root_device, watch=watch)

    def _make_mesh(self) -> dist.ProcessGroup:
        """Creates the mesh to shard over, which has one axis or two (replica, shard); returns the dp group."""
        dp_mesh = self._mesh = self.device_mesh["data_parallel"]
        if self.num_replicas > 1:
            sizes = (self.num_replicas, self.world_size // self.num_replicas)
            self._mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=("replica", "shard"))
        if self.ep > 1:
            self._expert_mesh = expert_mesh(self.root_device.type, num_replicas=self.num_replicas, ep=self.ep)
        if self.cp > 1:
            sizes = self.world_size // self.cp, self.cp
            mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=("dp", "cp"))
            dp_mesh, self._context_group = mesh["dp"], mesh["cp"].get_group()
        return dp_mesh.get_group()

    def barrier(self, name: str | None = None) -> None:
        self.ranks.step()  # so that a rank that does not arrive has fewer steps
        super().barrier(name)

    def on_exception(self, exception: BaseException) -> None:
        self.ranks.fail(exception)

    def teardown(self) -> None:
        try:
            with self.ranks.own_deadline(), logged_behind_failure():
                self._writes.wait()
        finally:
            self.ranks.close()
            super().teardown()

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Inside the context, models of roles are built on the meta device; `setup` loads their shards."""
        with super().tensor_init_context(empty_init), models_made_by(empty_model):
            yield

    def setup(self, trainer: L.Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            paths = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
            for path in paths:
                check_local(dirpath=path)
            check_all_see(sorted({Path(path) for path in paths if path is not None}), self.ranks)
        self._split_models()
        if not isinstance(self.precision_plugin, ClipsByStrategy):
            plugin = subclassed(self.precision_plugin, ClipsByStrategy)
            plugin.strategy = self
            self.precision_plugin = plugin
        super().setup(trainer)

    def _split_models(self) -> None:
        """Splits each of the module's models over the ranks of its role, and removes it from all other ranks."""
        assert self.lightning_module is not None
        assert isinstance(self.ranks, ProcessRanks)
        place_by_role: dict[str, Place] = {}
        for role, mesh in role_meshes(self.lightning_module).items():
            if (role, mesh) not in self._places:
                self._places[role, mesh] = self._make_place(mesh)
            place_by_role[role] = self._places[role, mesh]
        if "policy" in place_by_role:
            place_by_role["value_head"] = place_by_role["policy"]  # a critic's head on the policy's body
        self.ranks.roles = {role: place.ranks for role, place in place_by_role.items()}
        for name, model in model_children(self.lightning_module).items():
            if not any(True for _ in model.parameters()):
                continue
            if name in place_by_role and not place_by_role[name].ranks.is_here:
                empty_out(model)
            elif self._needs_split(model):
                self.shard(model, place_by_role.get(name))
        if own := own_parameters(self.lightning_module):
            self.ranks.share(own)

    def _make_place(self, mesh: RoleMesh) -> Place:
        members = mesh.ranks(self.world_size)
        assert isinstance(self.ranks, ProcessRanks)
        return make_place(self.ranks, members, [len(members)], ["dp"], self.root_device)

    def _needs_split(self, model: torch.nn.Module) -> bool:
        return not isinstance(model, FSDPModule)

    def shard(self, model: torch.nn.Module, place: Place | None = None) -> None:
        """Shards a model in place, layer by layer, and loads its weights if they are not loaded yet. Collective."""
        ranks = self.ranks if place is None else place.ranks
        is_mixed = self.precision_plugin.precision == "bf16-mixed"
        # Halves the bytes to gather. Autocast would round the same weights, except norm weights.
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        shard = functools.partial(
            fully_shard,
            mesh=self._mesh if place is None else place.mesh,
            offload_policy=CPUOffloadPolicy() if self._offloads_parameters else OffloadPolicy(),
        )
        layers = decoder_layers(model)
        if hasattr(model, "config"):
            conversions(model)  # keeps the rules for later, because sharding renames the model's class
        if not layers and hasattr(model, "config"):
            raise ValueError(
                f"FSDP2Strategy needs models that name their decoder layers in _no_split_modules, but "
                f"{type(model).__name__} does not."
            )
        is_compiled = compiles(model, self.root_device, self.compile_layers)
        if self._expert_mesh is not None and moe_blocks(model):
            split_experts(cast("PreTrainedModel", model), self._expert_mesh)
        if self.activation_checkpointing:  # before layers are wrapped, because a layer may itself be a MoE block
            wrap_blocks(model)
        if is_mixed:
            setattr(model, LAYER_DTYPE, torch.bfloat16)
        for number, layer in reversed([*enumerate(layers, 1)]):  # layers inside other layers first
            trains = any(parameter.requires_grad for parameter in layer.parameters())
            if is_compiled:
                layer.forward = torch.compile(layer.forward, dynamic=True)
            if is_mixed:  # probes and model calls run outside the Trainer's autocast
                layer.forward = torch.autocast(self.root_device.type, torch.bfloat16)(layer.forward)
            if self.activation_checkpointing and trains:
                checkpointed = functools.partial(checkpoint_activations, layer.forward, use_reentrant=False)
                layer.forward = functools.partial(checkpointed, context_fn=recompute_contexts)
            if "activations" in self.offload_to_cpu and trains:
                offload_activations(layer)
            if self.state_copies is not None:
                layer.register_forward_pre_hook(functools.partial(self.state_copies.drain, number / len(layers)))
            policy = mixed if is_mixed else MixedPrecisionPolicy()
            for block in moe_blocks(layer).values():
                if is_mixed:  # routers are gathered in float32
                    shard(router_of(block), reshard_after_forward=self.reshard_after_forward)
                if self._expert_mesh is not None:
                    options = {"reshard_after_forward": self.reshard_after_forward, "mp_policy": policy}
                    shard_experts(block, self._expert_mesh, num_ranks=ranks.size, **options)
            shard(layer, reshard_after_forward=self.reshard_after_forward, mp_policy=policy)
        # Logprobs read the root's own parameters (embedding, last norm, head) outside its forward.
        shard(model, reshard_after_forward=False)
        role = take_role(model)
        if role is not None:
            fill_model(model, role, HOST if self._offloads_parameters else self.root_device, ranks)

    @property
    def _offloads_parameters(self) -> bool:
        return "parameters" in self.offload_to_cpu and self.root_device.type != "cpu"

    @functools.cached_property
    def state_copies(self) -> StateCopies | None:
        moves = {"parameters", "optimizer"} & set(self.offload_to_cpu) == {"optimizer"}
        return StateCopies(self.root_device) if moves and self.root_device.type != "cpu" else None

    def model_to_device(self) -> None:
        if not self._offloads_parameters:
            super().model_to_device()
            return
        assert self.lightning_module is not None
        _update_properties(self.lightning_module, device=self.root_device)  # sets `module.device`, for batches
        for parameter in own_parameters(self.lightning_module).values():  # these are not sharded
            parameter.data = parameter.data.to(self.root_device)
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
        ranks = self.ranks.of_role(role)
        if not ranks.is_here:
            return OtherRanksModel()
        return FSDP2Model(
            model,
            settings,
            ranks=ranks,
            value_head=value_head,
            reduce_every_microbatch=self.reduce_every_microbatch,
            is_offloaded=self._offloads_parameters,
            is_policy=role == "policy",
            context_group=self._context_group,
        )

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the update. Offloaded optimizer state is copied while the device computes; see StateCopies."""
        copies: Any = contextlib.nullcontext(lambda: None)
        if self.state_copies is not None:
            models = getattr(self.lightning_module, "parallel_models", {}).values()  # in the order of training
            trained = (each for each in models if isinstance(each, FSDP2Model) and each.is_trained)
            copies = self.state_copies.during_step(optimizer, [None, *trained][-1])
        with copies as bring_others:

            def closure_and_state() -> Any:
                result = closure()
                self.ranks.average_gradients()  # no effect if RolloutLoop has averaged them already
                bring_others()
                return result

            return super().optimizer_step(optimizer, closure_and_state, *args, **kwargs)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.model is not None
        return optimizer_state(self.model, optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes a folder, and renames it when all ranks have written their parts. Raises OSError on failure."""
        name, mark = self.broadcast((str(filepath), f"{own_mark()}-{secrets.token_hex(8)}"))
        folder = Path(name)
        assert self._save_group is not None
        write = folder_writer(
            checkpoint,
            folder,
            writer_mark=mark,
            group=self._save_group,
            is_main=self.is_global_zero,
            copies=self.save_async,
        )
        with self.ranks.phase("checkpoint", has_own_deadline=True):  # may take any time while the disk makes progress
            if self.save_async:
                self._writes.add(folder, write)
                return
            self._writes.run(folder, write)
            self.barrier()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            self._writes.remove(filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads weights and optimizers in place, and returns all other entries; see `load_folder`."""
        self._writes.wait()
        assert self.model is not None
        rest = load_folder(Path(self.broadcast(str(checkpoint_path))), self.model, self.optimizers)
        for optimizer in self.optimizers if "optimizer" in self.offload_to_cpu else ():
            move_state(optimizer, HOST)
        return rest


def _check_divides(name: str, size: int, numbers: dict[str, int]) -> None:
    """Raises ValueError, suggesting the nearest sizes that fit, unless `size` divides all numbers (name → number)."""
    for number_name, number in numbers.items():
        if number % size:
            sizes = " or ".join(map(str, nearest_divisors(math.gcd(*numbers.values()), size)))
            raise ValueError(f"{name}={size} must divide the {number} {number_name}. Set it to {sizes}.")


@functools.cache
def destroy_groups_at_exit() -> None:
    """Destroys process groups at exit, because gloo's threads would otherwise abort the process."""

    def destroy() -> None:
        deadline = time.monotonic() + EXIT_S
        time.sleep(0.02)  # lets a thread that waits for the GIL free its tensors
        while _is_gloo_busy() and time.monotonic() < deadline:
            time.sleep(0.02)
        if dist.is_initialized():
            dist.destroy_process_group()

    atexit.register(destroy)


def _is_gloo_busy() -> bool:
    """Whether one of gloo's threads is running; False if the system does not report it."""
    for file in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has exited
            if b"(pt_gloo_runloop) R " in file.read_bytes():
                return True
    return False
