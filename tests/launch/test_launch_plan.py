"""The planner: who runs where, on which GPUs, with which addresses; and what it refuses. Tables, no processes."""

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightrl.commands.launch.plan import RunFacts, describe, drawing, make_plan, place
from lightrl.commands.launch.settings import Launch, Layout, allocation_of, layout_of
from lightrl.engines.engine import PlannedEngine
from lightrl.models import RoleMesh
from lightrl.plan.memory import PlannedRole, PlannedRun
from lightrl.plan.sizes import ModelSize

SEVEN_B = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip


FACTS = RunFacts()


SERVERS = PlannedEngine("SGLangEngine", "servers")
FRUGAL = {"checkpoint_activations": True, "reduce_every_microbatch": True}


def planned(**settings):
    """A run that trains the 7B model in one process."""
    config = AutoConfig.for_model(**SEVEN_B)
    with torch.device("meta"):
        size = ModelSize.of(AutoModelForCausalLM.from_config(config))
    role = PlannedRole("policy", size, size.parameters, range(1))
    sizes = {"prompts": 64, "group_size": 8, "num_minibatches": 1, "update_epochs": 1, "microbatch_tokens": 16384}
    lengths = {"prompt_tokens": 512, "new_tokens": 512, "longest": 1024}
    return PlannedRun((role,), 1, "whole", **{**sizes, **lengths, "is_mixed": True, **settings})


def plan_of(facts: RunFacts = FACTS, **launch):
    return make_plan(Launch(**{"launcher": "slurm", **launch}), facts, folder="runs/launch-0", port=29500)


DIAGRAMS = {
    "one host, half each": (
        {"gpus_per_node": 4, "ranks": 2, "servers": 1, "tp": 2},
        "rank 0 | rank 1 | server 0 | server 0",
    ),
    "a host each": (
        {"nodes": 2, "gpus_per_node": 2, "ranks": 2, "servers": 2, "tp": 1},
        "rank 0 | rank 1 / server 0 | server 1",
    ),
    "servers also beside ranks": (
        {"nodes": 2, "gpus_per_node": 4, "allocation": "sglang:d3t2+fsdp:d2"},
        "rank 0 | rank 1 | server 0 | server 0 / server 1 | server 1 | server 2 | server 2",
    ),
    "a server begins at a multiple of tp": (
        {"nodes": 2, "gpus_per_node": 4, "ranks": 1, "servers": 2, "tp": 2},
        "rank 0 | idle | server 0 | server 0 / server 1 | server 1 | idle | idle",
    ),
    "ranks that do not fill hosts are spread evenly": (
        {"nodes": 2, "gpus_per_node": 4, "ranks": 6, "servers": 2, "tp": 1},
        "rank 0 | rank 1 | rank 2 | server 0 / rank 3 | rank 4 | rank 5 | server 1",
    ),
    "colocated": (
        {"gpus_per_node": 4, "ranks": 4, "servers": 2, "tp": 2, "placement": "colocated"},
        "rank 0 + server 0 | rank 1 + server 0 | rank 2 + server 1 | rank 3 + server 1",
    ),
    "colocated, as AReaL writes it": (
        {"gpus_per_node": 2, "allocation": "sglang[gen]:t2|fsdp[actor]:d2"},
        "rank 0 + server 0 | rank 1 + server 0",
    ),
    "as many GPUs as the run needs": ({"ranks": 1, "servers": 1, "tp": 2}, "rank 0 | idle | server 0 | server 0"),
}


@pytest.mark.parametrize("case", DIAGRAMS)
def test_ranks_come_first_and_servers_fill_what_is_left(case):
    launch, expected = DIAGRAMS[case]
    rows = drawing(plan_of(**launch)).splitlines()[1:]
    assert " / ".join(" | ".join(cell.strip() for cell in row.split("|")[1:]) for row in rows) == expected


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 16])
def test_no_gpu_has_two_users_unless_colocated(nodes, gpus, ranks):
    for tp in (1, 2, 4):
        for servers in (1, 2, 5):
            try:
                placed = place(Layout(ranks, servers, tp), nodes, gpus)
            except ValueError:
                continue
            used = [(host, gpu) for one in placed for host, groups in one.items() for group in groups for gpu in group]
            assert len(used) == len(set(used)) == ranks + servers * tp
            assert all(host < nodes and gpu < gpus for host, gpu in used)
            assert len({len(groups) for groups in placed[0].values()}) == 1  # Lightning needs as many on each host


def test_processes_get_their_gpus_environment_and_addresses():
    plan = plan_of(nodes=2, gpus_per_node=4, ranks=4, servers=2, tp=2)
    ranks, (servers,) = plan.of("trainer"), plan.of("servers")
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in ranks] == ["0,1,2,3"] * 4
    assert ranks[3].rank_environment["RANK"] == ranks[3].rank_environment["LOCAL_RANK"] == "3"
    assert ranks[3].environment["MASTER_ADDR"] == "node1"
    assert ranks[0].environment["LIGHTRL_SERVER_ADDRS"] == "file://runs/launch-0/servers?servers=2"
    command = " ".join(servers.command)
    assert "serve" in command
    assert "--host node2 --port 29501" in command
    assert "--register runs/launch-0/servers --leave_s 0" in command
    assert "--devices 0,1,2,3" in command
    trainer = plan.settings["trainer"]
    assert (trainer["num_nodes"], trainer["devices"]) == (1, 4)
    assert trainer["strategy"] == {"class_path": "FSDP2Strategy"}
    assert trainer["engine"]["init_args"]["servers"] is None  # the run starts none itself
    assert trainer["engine"]["init_args"]["weight_folder"] == "runs/launch-0/weights"  # the servers are elsewhere


def test_the_allocation_decides_how_the_model_is_split():
    trainer = plan_of(nodes=3, gpus_per_node=4, allocation="sglang.d4t2+d2p2t1").settings["trainer"]
    assert trainer["strategy"] == {"class_path": "Parallel3DStrategy", "init_args": {"pp": 2, "tp": 1}}


@pytest.mark.parametrize(
    ("allocation", "sizes"),
    [("megatron:d4p2e2", {"pp": 2, "tp": 1, "ep": 2}), ("fsdp:d2t2c2", {"pp": 1, "tp": 2, "cp": 2})],
)
def test_the_allocation_sets_ep_and_cp_of_a_split_model_too(allocation: str, sizes: dict):
    new, old = RunFacts(), RunFacts(strategy="Parallel3DStrategy", trainer_pp=sizes["pp"], trainer_tp=sizes["tp"])
    for facts, given in ((new, sizes), (old, {name: size for name, size in sizes.items() if name in ("ep", "cp")})):
        strategy = plan_of(facts, gpus_per_node=8, allocation=allocation).settings["trainer"]["strategy"]
        assert strategy == {"class_path": "Parallel3DStrategy", "init_args": given}


@pytest.mark.parametrize("strategy", [None, "FSDP2Strategy"])
@pytest.mark.parametrize(
    ("allocation", "sizes"),
    [("d2c2", {"cp": 2}), ("megatron:d4e2", {"ep": 2}), ("megatron:(attn:d2c2|ffn:d1e4)", {"cp": 2, "ep": 4})],
)
def test_the_allocation_sets_cp_and_ep_of_all_its_gpus(allocation: str, sizes: dict, strategy: str | None):
    facts = RunFacts(strategy=strategy, planned=planned(engine=SERVERS))
    plan = plan_of(facts, gpus_per_node=6, allocation=f"vllm:d2+{allocation}")
    assert plan.settings["trainer"]["strategy"] == {"class_path": "FSDP2Strategy", "init_args": sizes}
    assert len(plan.of("trainer")) == plan.layout.ranks == 4
    assert plan.settings["trainer"]["engine"]["class_path"] == "VLLMEngine"
    run = plan.of_memory(facts.planned)
    assert (run.roles[0].cp, run.ep) == (sizes.get("cp", 1), sizes.get("ep", 1))


@pytest.mark.parametrize(
    "allocation",
    [
        "sglang:d2t4|megatron:d8e8",
        "sglang:d8t8+megatron:d64e8",
        "vllm:d2+fsdp:d2c2",
        "megatron:d4p2t8e4",
        "fsdp:d4t2c2",
    ],
)
def test_an_allocation_string_is_written_as_it_is_read(allocation: str):
    assert allocation_of(layout_of(Launch(allocation=allocation), ranks=1)) == allocation


def test_the_advice_is_a_new_allocation_where_an_allocation_decides():
    refuses_3d = {"refusal": lambda run: "not in this test" if run.layout == "3D" else None}
    facts = RunFacts(ranks=16, planned=planned(engine=SERVERS, **refuses_3d))
    launch = {"gpus_per_node": 8, "allocation": "sglang:d2t2+fsdp:d2"}
    with pytest.raises(ValueError, match="gpu_memory_gb=40 is not enough") as raised:
        plan_of(facts, **launch, gpu_memory_gb=40)
    (advised,) = re.findall(r"launch.allocation to (sglang:d2t2\+fsdp:d\d+(?:c\d+)?)", str(raised.value))
    assert "trainer.devices" not in str(raised.value)
    notes = plan_of(facts, **{**launch, "nodes": 8, "allocation": advised}).notes
    assert any(
        "trainer.devices · trainer.num_nodes is 16, but has no effect: launch.allocation" in note for note in notes
    )


def test_the_engines_own_servers_are_placed_if_the_launch_names_none():
    plan = plan_of(RunFacts(engine="SGLangEngine", servers=2, tp=2), gpus_per_node=8)
    assert plan.layout == Layout(1, 2, 2)


def test_the_servers_are_of_the_runs_engine():
    plan = plan_of(RunFacts(engine="VLLMEngine"), gpus_per_node=2, ranks=1, servers=1)
    assert plan.settings["trainer"]["engine"]["class_path"] == "VLLMEngine"  # `lightrl serve` reads it there
    assert len(plan.of("servers")) == 1
    assert plan_of(ranks=1, servers=1).settings["trainer"]["engine"]["class_path"] == "SGLangEngine"


def test_a_run_without_servers_keeps_its_engine():
    assert "engine" not in plan_of(ranks=2).settings["trainer"]


def test_on_a_cpu_nobody_gets_a_gpu():
    plan = plan_of(RunFacts(on_cpu=True), gpus_per_node=2, ranks=1, servers=1)
    assert len(plan.processes) == 2
    assert not any("CUDA_VISIBLE_DEVICES" in one.environment or "--devices" in one.command for one in plan.processes)


REFUSED = {
    "a server beside one rank": (
        {"gpus_per_node": 1, "ranks": 1, "servers": 1}, {}, "needs 1 GPU next to 1 trainer rank, .* has room for 0",
    ),
    "more ranks than GPUs": ({"gpus_per_node": 2, "ranks": 4}, {}, "4 trainer ranks need 4 GPUs"),
    "ranks that cannot be spread": ({"nodes": 2, "gpus_per_node": 4, "ranks": 7}, {}, "spread evenly"),
    "servers next to ranks": ({"gpus_per_node": 4, "ranks": 3, "servers": 2}, {}, "has room for 1 server"),
    "a server over two hosts": ({"nodes": 2, "gpus_per_node": 2, "ranks": 1, "servers": 1, "tp": 4}, {}, "the 2 GPUs"),
    "tp that leaves GPUs over": ({"gpus_per_node": 8, "ranks": 2, "servers": 2, "tp": 3}, {}, "must divide the 8 GPUs"),
    "colocated tp": (
        {"gpus_per_node": 4, "ranks": 2, "servers": 1, "tp": 4, "placement": "colocated"}, {}, "the 2 trainer ranks",
    ),
    "trainer tp over hosts": ({"nodes": 2, "gpus_per_node": 2, "allocation": "t4"}, {}, "tp=4 must divide the 2 ranks"),
    "pp that does not divide": (
        {"nodes": 1, "gpus_per_node": 4, "ranks": 3}, {"strategy": "Parallel3DStrategy", "trainer_pp": 2}, "pp=2",
    ),
    "a role's mesh": (
        {"gpus_per_node": 4, "ranks": 4}, {"meshes": {"critic": RoleMesh(4, 2)}}, "model.critic.mesh does not fit",
    ),
    "another strategy": ({"ranks": 2}, {"strategy": "DDPStrategy"}, "trainer.strategy=DDPStrategy"),
    "no cp": ({"allocation": "d4"}, {"strategy": "FSDP2Strategy", "trainer_cp": 2}, "has cp=1, but .* has cp=2"),
    "less ep": ({"allocation": "megatron:d4e2"}, {"strategy": "FSDP2Strategy", "trainer_ep": 4}, "has ep=2, but .*4"),
    "a strategy that differs": ({"allocation": "t2"}, {"strategy": "FSDP2Strategy"}, "supports neither"),
    "another engine": ({"servers": 1}, {"engine": "LocalEngine"}, "trainer.engine is LocalEngine"),
    "vLLM next to a rank on its GPU": (
        {"gpus_per_node": 2, "ranks": 2, "servers": 1, "placement": "colocated"}, {"engine": "VLLMEngine"}, "separate",
    ),
    "servers by address": ({"servers": 1}, {"engine": "SGLangEngine", "has_urls": True}, "Remove urls"),
    "tp and heads": ({"nodes": 2, "gpus_per_node": 8, "servers": 1, "tp": 8}, {"planned": planned()}, "28 attention"),
    "memory of a rank": ({"gpu_memory_gb": 80, "ranks": 1}, {"planned": planned()}, "weights 30.5 GB"),
    "memory of a server": (
        {"gpus_per_node": 128, "gpu_memory_gb": 16, "ranks": 64, "servers": 1, "tp": 1},
        {"planned": planned(microbatch_tokens=1024, **FRUGAL, engine=SERVERS)}, "a server's GPU needs 15",
    ),
    "vllm in place of SGLang": (
        {"allocation": "vllm:d2+d2"}, {"engine": "SGLangEngine"}, "to VLLMEngine, or the allocation's .* to sglang",
    ),
    "SGLang in place of vllm": (
        {"allocation": "sglang:d2+d2"}, {"engine": "VLLMEngine"}, "to SGLangEngine, or the allocation's .* to vllm",
    ),
    "pipelines of servers": ({"allocation": "vllm:d2p2+d2"}, {}, "but no p"),
    "slices of experts": ({"allocation": "megatron:(attn:d4|ffn:d1t2e2)"}, {}, "ffn's t must be 1"),
    "models apart": ({"allocation": "fsdp[a]:d4+fsdp[c]:d4"}, {}, "mesh: "),
    "nothing to train": ({"allocation": "sglang:d4"}, {}, "it trains nothing"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_starts(case):
    launch, facts, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        plan_of(RunFacts(**facts), **launch)


WRONG = {
    "both": ({"allocation": "d2", "ranks": 2}, "Set either launch.allocation"),
    "local over hosts": ({"launcher": "local", "nodes": 2}, "needs a launcher that reaches other hosts"),
    "hosts": ({"nodes": 2, "hosts": ["a"]}, "must name all 2"),
    "an image": ({"launcher": "kubernetes"}, "needs launch.container"),
    "port": ({"port": 80}, "launch.port"),
    "nodes": ({"nodes": 0}, "nodes must be"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_section_that_contradicts_itself_is_refused(case):
    settings, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        Launch(**{"launcher": "slurm", **settings})


def test_the_plan_says_what_is_idle_and_what_memory_it_needs():
    text = describe(plan_of(RunFacts(planned=planned(engine=SERVERS)), gpus_per_node=8, ranks=4, servers=1, tp=2))
    assert "2 of 8 GPUs stay idle." in text
    assert "per server GPU: 7.6 GB" in text
    assert "node1:29500" in text
    assert "runs/launch-0/node1/servers-0.log" in text


def test_of_many_hosts_the_first_and_the_last_are_shown():
    text = drawing(plan_of(nodes=128, gpus_per_node=1, ranks=128))
    assert len(text.splitlines()) == 18
    assert "112 more" in text
    assert "node128" in text
