"""models/routes.py: recorded routes replayed by a model, by SingleModel, and what joins them on their way."""

import numpy as np
import pytest
import torch
from moe_cases import EACH_FAMILY, moe_model, moe_spec, sampled, some_tokens
from tiny import gradients, tiny_spec

from lightrl.columns import NATIVE, as_columns, cut, extended, joined
from lightrl.errors import EngineError
from lightrl.experience import Experience
from lightrl.models.moe import moe_blocks, router_of
from lightrl.models.routes import RouteLayout, Routes, as_bytes, load_entropy, replaying, wrap_blocks
from lightrl.strategies import FSDP2Strategy, LogprobSettings, SingleModel, fsdp2


def logits(model, token_ids):
    return model(input_ids=token_ids, use_cache=False).logits


def shifted(routes):
    """Other experts for each token."""
    return torch.where(routes == NATIVE, routes, (routes + 1) % 4)


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_own_routes_change_no_bit_and_others_train_the_router(family):
    model, token_ids = moe_model(family), some_tokens(2, 7)
    plain = logits(model, token_ids)
    routes = Routes(model)
    with torch.no_grad(), routes.recording() as recorded:
        assert torch.equal(logits(model, token_ids), plain)
    own = recorded()
    assert own.shape[0] == 14
    with replaying(own):
        replayed = logits(model, token_ids)
    assert torch.equal(replayed, plain)
    plain.square().sum().backward()
    of_plain = gradients(model)
    replayed.square().sum().backward()
    assert all(torch.equal(value, of_plain[name]) for name, value in gradients(model).items())
    with replaying(shifted(own)):
        other = logits(model, token_ids)
    assert not torch.allclose(other, plain, atol=1e-3)
    other.square().sum().backward()
    for block in moe_blocks(model).values():
        assert next(router_of(block).parameters()).grad.abs().max() > 0


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", pytest.param("deepseek_v2", marks=pytest.mark.extra)])
def test_an_expert_outside_of_the_top_k_has_a_weight_with_a_gradient(family):
    model = moe_model(family, num_hidden_layers=1 if family == "qwen3_moe" else 2)
    block = list(moe_blocks(model).values())[-1]
    routes, hidden = Routes(model), torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), routes.recording() as recorded:
        block(hidden)
    others = torch.stack([torch.tensor(sorted({0, 1, 2, 3} - set(row.tolist()))) for row in recorded()])
    with replaying(as_bytes(others[:, None], 4)):
        block(hidden).square().sum().backward()
    rows = router_of(block).weight.grad.abs().amax(1)
    assert (rows[others.unique()] > 0).all()


def test_tokens_without_known_routes_route_natively():
    model, token_ids = moe_model(), some_tokens(1, 8)
    routes = Routes(model)
    with torch.no_grad(), routes.recording() as recorded:
        plain = logits(model, token_ids)
    mixed = shifted(recorded())
    mixed[:5] = NATIVE
    with torch.no_grad(), replaying(mixed):
        replayed = logits(model, token_ids)
    assert torch.allclose(replayed[:, :5], plain[:, :5], atol=1e-5)
    assert not torch.allclose(replayed[:, 5:], plain[:, 5:], atol=1e-3)


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4_text"])  # a part of a layer, a whole layer
def test_a_recomputed_layer_takes_the_routes_of_its_own_forward(family, monkeypatch):
    monkeypatch.setattr(fsdp2, "fully_shard", lambda *_, **__: None)
    token_ids = some_tokens(2, 6)

    def run(model):
        routes = Routes(model)
        with torch.no_grad(), routes.recording() as recorded:
            logits(model, token_ids)
        outputs = []
        for row, part in enumerate(shifted(recorded()).split(6)):
            with replaying(part):
                outputs.append(logits(model, token_ids[row : row + 1]))
        torch.cat(outputs).square().sum().backward()  # when the first forward's routes are long gone
        return gradients(model)

    kept = run(moe_model(family))
    model = moe_model(family)
    strategy = FSDP2Strategy(activation_checkpointing=True)
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.shard(model)
    again = run(model)
    assert kept.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in kept.items())


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_an_engines_routes_are_those_of_a_forward_and_give_its_logprobs(family):
    model = moe_model(family)
    experience = Experience.from_trajectories(sampled(model))
    assert (experience.routes[0, experience.lengths[0] - 1 :] == NATIVE).all()
    assert (experience.routes[0, : experience.lengths[0] - 1] != NATIVE).all()
    single = SingleModel(model, LogprobSettings())
    (replayed,) = single.forward([experience])
    (native,) = single.forward([experience.without(["routes"])])
    assert torch.allclose(replayed.logprobs[experience.loss_mask], native.logprobs[experience.loss_mask], atol=1e-5)
    assert torch.allclose(replayed.logprobs, experience.behavior_logprobs, atol=1e-5)


def test_replay_does_not_depend_on_how_rows_are_cut_or_padded():
    model = moe_model()
    experience = Experience.from_trajectories(sampled(model))
    experience = experience.with_tensors({"routes": shifted(experience["routes"])})
    reference = None
    for form in ("rectangles", "packed"):
        single = SingleModel(model, LogprobSettings(), form=form)
        for parts in ([experience], [experience.select([row]) for row in range(3)]):
            single.forward_backward(parts, lambda _, outputs: outputs.logprobs.sum(), torch.Tensor.backward)
            found = gradients(model)
            reference = reference or found
            for name, value in found.items():
                assert torch.allclose(value, reference[name], atol=1e-5), (form, len(parts), name)
    single.forward_backward(
        [experience.without(["routes"])], lambda _, outputs: outputs.logprobs.sum(), torch.Tensor.backward
    )
    assert any(not torch.allclose(value, reference[name], atol=1e-3) for name, value in gradients(model).items())


def test_shared_prompts_are_not_used_and_another_role_routes_natively():
    model = moe_model()
    experience = Experience.from_trajectories(sampled(model))
    changed = experience.with_tensors({"routes": shifted(experience["routes"])})
    (whole,) = SingleModel(model, LogprobSettings(), form="rectangles").forward([changed])
    (shared,) = SingleModel(model, LogprobSettings(), form="shared_rows").forward([changed])
    assert torch.equal(shared.logprobs, whole.logprobs)
    (other_role,) = SingleModel(model, LogprobSettings(), is_policy=False).forward([changed])
    assert torch.allclose(other_role.logprobs, experience.behavior_logprobs, atol=1e-5)


def test_compiled_layers_refuse_routes(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **settings: None)
    model = moe_model()
    experience = Experience.from_trajectories(sampled(model))
    single = SingleModel(model, LogprobSettings(), compile_layers=True)
    with pytest.raises(ValueError, match="Compiled layers cannot replay"):
        list(single.forward([experience]))


def test_routes_of_another_model_are_refused():
    model, token_ids = moe_model(), some_tokens(1, 3)
    wrap_blocks(model)
    for width, message in ((5, "5 bytes per token, .* fit 2 MoE blocks of 4 experts"), (6, r"shape \(3, 3\)")):
        with replaying(torch.zeros(3, width, dtype=torch.uint8)), pytest.raises(ValueError, match=message):
            logits(model, token_ids)


def test_experts_are_bytes_where_they_fit_and_an_unknown_one_makes_all_of_a_block_unknown():
    assert as_bytes(torch.tensor([[[0, 2], [1, -1]]]), 4).tolist() == [[0, 2, 255, 255]]
    wide = as_bytes(torch.tensor([[[300, 2]], [[-1, -1]]]), 384)
    assert wide.shape == (2, 4)
    assert wide.view(torch.int16).tolist() == [[300, 2], [-1, -1]]


def test_a_model_with_more_than_256_experts_replays_its_own_routes():
    model, token_ids = moe_model(num_experts=300), some_tokens(1, 5)
    routes = Routes(model)
    with torch.no_grad(), routes.recording() as recorded:
        plain = logits(model, token_ids)
    assert recorded().shape == (5, 8)
    with torch.no_grad(), replaying(recorded()):
        assert torch.equal(logits(model, token_ids), plain)


def test_the_layout_knows_which_layers_have_experts():
    assert RouteLayout.of(tiny_spec().load_config()) is None
    layout = RouteLayout.of(moe_spec("deepseek_v3").load_config())
    assert layout == RouteLayout(layers=(1,), num_layers=2, num_experts=4)
    experts = np.array([[[9, 9], [3, 1]], [[0, 0], [-1, -1]]], np.int32)  # of the dense layer too
    assert layout.encode(experts) == [3, 1, 255, 255]
    with pytest.raises(ValueError, match="expert 4, but the model has 4 experts"):
        layout.encode(experts + 1)


def test_routes_of_a_branch_follow_those_of_the_first_conversation():
    left, right = (as_columns({"routes": routes}) for routes in ([1, 2, 3, 255], [7, 8, 9]))
    assert joined(left, 4, cut(right, 3, 1, 3), 2) == {"routes": [1, 2, 3, 255, 8, 9]}
    assert joined({}, 2, cut(right, 3, 2, 3), 1) == {"routes": [255, 255, 9]}
    assert joined(cut(left, 4, 0, 3), 3, {}, 1) == {"routes": [1, 2, 3, 255]}
    assert joined({}, 4, {}, 2) == {}


def test_a_token_that_is_computed_again_has_its_new_routes():
    def routes(*experts):
        return as_columns({"routes": experts})

    first = extended({}, 2, routes(1, 2, 3), 2)  # a prompt of 2 tokens, a completion of 2, a byte each
    assert first == routes(1, 2, 3, 255)
    read = extended(first, 4, {}, 1)
    assert read == routes(1, 2, 3, 255, 255)
    assert extended(read, 5, routes(9, 255, 9, 4, 5, 6), 2) == routes(9, 2, 9, 4, 5, 6, 255)
    assert extended({}, 2, {}, 3) == {}
    with pytest.raises(EngineError, match="5 bytes of routes for a prompt of 2 tokens and a completion of 2"):
        extended({}, 2, routes(0, 0, 0, 0, 0), 2)


def test_the_load_of_experts_and_its_entropy_worked_by_hand():
    layout = RouteLayout(layers=(1, 2), num_layers=3, num_experts=4)
    routes = torch.tensor([[[0, 1], [0, 2]], [[NATIVE, NATIVE], [1, 3]]], dtype=torch.uint8)  # top 1 of two blocks
    load = layout.load(routes)
    assert load.tolist() == [[2, 1, 0, 0], [0, 1, 1, 1]]
    assert load_entropy(load) == pytest.approx((0.6365142 + 1.0986123) / 2)  # log 3 - 2/3 log 2, log 3
    assert load_entropy(torch.tensor([[5, 5, 5, 5]])) == pytest.approx(1.3862944)
    assert load_entropy(torch.tensor([[0, 0, 0, 0], [5, 5, 5, 5]])) == pytest.approx(1.3862944)  # a block without any
