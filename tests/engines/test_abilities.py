"""The dtypes that engines name."""

import pytest
import torch
from fake_sglang.process import FakeServerProcess
from transformers import AutoConfig

from lightrl.engines import LocalEngine, SGLangEngine
from lightrl.engines.sglang.command import dtype_of_auto


@pytest.mark.parametrize(
    ("dtype", "auto"),
    [
        pytest.param("bfloat16", "bfloat16", id="the config's"),
        pytest.param("float32", "float16", id="but float16 for float32"),
        pytest.param(None, "float16", id="or none"),
    ],
)
def test_auto_is_the_dtype_that_sglang_makes_of_it(dtype, auto):
    config = AutoConfig.for_model("qwen3", dtype=dtype)
    assert dtype_of_auto(config) == getattr(torch, auto)


@pytest.mark.parametrize(("dtype", "name"), [("auto", "bfloat16"), ("float32", "float32"), ("float16", "float16")])
def test_sglang_names_the_dtypes_of_its_servers(dtype, name):
    with FakeServerProcess(dtype=dtype) as server:
        engine = SGLangEngine(urls=[server.url])
        try:
            engine.start(AutoConfig.for_model("qwen3", dtype="bfloat16"))
            assert engine.dtypes() == {name}
        finally:
            engine.close()


def test_a_local_engine_names_the_dtype_that_auto_became():
    engine = LocalEngine(max_batch=1)
    engine.start(AutoConfig.for_model("llama", dtype="bfloat16", num_hidden_layers=1, hidden_size=64))
    try:
        assert engine.dtypes() == {"float32"}  # on a CPU
    finally:
        engine.close()
