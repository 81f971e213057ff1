"""Replayed routes on one rank and on two, with recomputed layers; replay_run.py is what runs."""

from pathlib import Path

import pytest
import torch
from rank_scripts import ROUNDING, run
from replay_run import POLICY
from tiny_run import Digits, TinyGRPO, make_trainer

from lightrl import FSDP2Strategy, LocalEngine


@pytest.mark.extra
def test_replay_gives_the_same_weights_on_one_rank_and_on_two_that_recompute(tmp_path):
    run(Path(__file__).with_name("replay_run.py"), tmp_path)
    native, one, two = (torch.load(tmp_path / name / "rank-0.pt") for name in ("native", "one rank", "two ranks"))
    for name, value in one.items():
        assert (value - two[name]).abs().max() <= ROUNDING * value.abs().max(), name
    assert any((value - native[name]).abs().max() > 1e-3 * value.abs().max() for name, value in one.items())


def test_compiled_layers_are_refused_before_a_model_is_built_if_the_engine_records_routes(tmp_path):
    trainer = make_trainer(tmp_path, strategy=FSDP2Strategy(compile_layers=True), engine=LocalEngine())
    with pytest.raises(ValueError, match="Compiled layers cannot replay"):
        trainer.fit(TinyGRPO(POLICY), datamodule=Digits())
