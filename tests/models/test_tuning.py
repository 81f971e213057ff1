"""Tuning: what strategies ask of a model, with all weights trained, and with a kind that only this test has."""

import contextlib
from dataclasses import dataclass

import pytest
import torch
from tiny import random_experience, tiny_model, tiny_spec

from lightrl.models.role import Role
from lightrl.models.tuning import ATTRIBUTE, Tuning, held_tensors, tuning_of, whole_parameters
from lightrl.strategies import LogprobSettings, SingleModel


@dataclass(frozen=True)
class Scales(Tuning):
    """A trained factor for each output of the query projections."""

    keeps_base = True

    def add_to(self, model, *, seed=0):
        model.requires_grad_(False)
        for name, module in list(model.named_modules()):
            if name.endswith("q_proj"):
                module.scale = torch.nn.Parameter(torch.linspace(0.5, 2.0, module.out_features))
                module.register_forward_hook(lambda module, _, output: output * module.scale)
        setattr(model, ATTRIBUTE, self)

    def adds(self, name):
        return name.endswith(".scale")

    def sources(self, model, part="whole"):
        names = list(held_tensors(model))
        if part == "added":
            return {name: [name] for name in names if self.adds(name)}
        found = {name: [name] for name in names if not self.adds(name)}
        for name in names if part == "whole" else ():
            if self.adds(name):
                found[name.replace(".scale", ".weight")].append(name)
        return found

    def merge(self, model, name, tensors):
        return tensors[0] if len(tensors) == 1 else tensors[0] * tensors[1][:, None]

    @contextlib.contextmanager
    def base_only(self, model):
        scales = [value for name, value in model.named_parameters() if self.adds(name)]
        kept = [value.detach().clone() for value in scales]
        with torch.no_grad():
            for value in scales:
                value.fill_(1.0)
            yield
            for value, before in zip(scales, kept, strict=True):
                value.copy_(before)


def exported(model, part):
    buckets = SingleModel(model, LogprobSettings()).full_parameters(10_000, part=part)
    return {name: value.detach().clone() for bucket in buckets for name, value in bucket.tensors.items()}


def logprobs(model):
    return next(iter(SingleModel(model, LogprobSettings()).forward([random_experience()]))).logprobs


def test_a_strategy_exports_the_parts_of_a_kind_that_it_does_not_know():
    model, plain = tiny_model(), tiny_model()
    Scales().add_to(model)
    original = dict(plain.named_parameters())
    added = exported(model, "added")
    assert added
    assert all(name.endswith("q_proj.scale") for name in added)
    base = exported(model, "base")
    assert base.keys() == original.keys()
    assert all(torch.equal(base[name], original[name]) for name in base)
    different = logprobs(plain)
    plain.load_state_dict(exported(model, "whole"), strict=False)
    torch.testing.assert_close(logprobs(plain), logprobs(model), rtol=1e-5, atol=1e-5)
    assert (different - logprobs(model)).abs().max() > 1e-3
    with tuning_of(model).base_only(model):
        torch.testing.assert_close(logprobs(model), different, rtol=1e-5, atol=1e-5)


def test_all_weights_trained_leave_no_base_and_nothing_added():
    model = tiny_model()
    tuning = tuning_of(model)
    assert tuning == Role(tiny_spec()).tuning
    assert not tuning.sources(model, "added")
    assert dict(whole_parameters(model)).keys() == held_tensors(model).keys()
    with pytest.raises(ValueError, match="Training changes all weights of this model"):
        tuning.base_only(model)
