"""Runs whose workflows are in workers: the numbers of rank 0 alone, and what is refused before a model is built."""

from pathlib import Path
from typing import Any

import pytest
from fake_sglang import python_of_fakes
from sglang_run import SERVER
from tiny_run import Digits, TinyGRPO, are_equal, make_trainer, weights

from lightrl import LocalEngine, SGLangEngine


def fitted(folder: Path, workers: int, **settings: Any) -> TinyGRPO:
    module = TinyGRPO(num_minibatches=2, workflow_workers=workers)
    engine = SGLangEngine(servers=1, sglang_python=python_of_fakes(folder, *SERVER))
    make_trainer(folder, engine=engine, **settings).fit(module, datamodule=Digits())
    return module


@pytest.mark.slow
def test_a_run_with_workers_has_the_weights_of_one_without(tmp_path: Path) -> None:
    plain, pooled = (fitted(tmp_path, workers) for workers in (0, 2))
    assert pooled.trained == plain.trained
    assert are_equal(weights(pooled), weights(plain))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (None, "workflow_workers=2 needs an engine with servers, .* LocalEngine generates in rank 0"),
        (LocalEngine(), "LocalEngine generates in rank 0"),
        (SGLangEngine(servers=1, adapters="served"), "workflow_workers=2 needs adapters='merged'"),
    ],
    ids=["the default", "LocalEngine", "served adapters"],
)
def test_an_engine_without_workers_is_refused_before_a_model_is_built(tmp_path, engine, message):
    module = TinyGRPO(workflow_workers=2)
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, engine=engine).fit(module, datamodule=Digits())
    assert not hasattr(module, "policy")
