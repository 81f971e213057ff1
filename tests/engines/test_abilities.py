"""Which engine has which optional ability."""

import pytest

from lightrl.engines import FakeEngine, LocalEngine, SGLangEngine, abilities

ALL = {
    "LivesOnLoop",
    "ScoresTokens",
    "LimitsContext",
    "DecodesInThreads",
    "NamesDtypes",
    "SharesDevices",
    "ProvesWeights",
}


@pytest.mark.parametrize(
    ("engine", "names"),
    [
        pytest.param(FakeEngine(), set(), id="fake"),
        pytest.param(LocalEngine(), {"ScoresTokens", "LimitsContext", "DecodesInThreads"}, id="local"),
        pytest.param(
            SGLangEngine(servers=1),
            {"LivesOnLoop", "ScoresTokens", "NamesDtypes", "SharesDevices", "ProvesWeights"},
            id="sglang",
        ),
    ],
)
def test_each_engine_has_its_abilities(engine, names):
    assert {name for name in ALL if isinstance(engine, getattr(abilities, name))} == names


@pytest.mark.parametrize(
    ("settings", "dtypes"),
    [
        ({}, {"float32", "auto"}),
        ({"weights_dtype": "bfloat16", "server_args": {"dtype": "float32"}}, {"bfloat16", "float32"}),
        ({"server_args": {"dtype": "float32"}}, {"float32"}),
    ],
)
def test_sglang_names_the_dtypes_of_weights_and_servers(settings, dtypes):
    assert SGLangEngine(servers=1, **settings).dtypes() == dtypes
