"""lightrl export of checkpoints that it cannot read; tests/trainer has those of exported models."""

import pytest
import torch

from lightrl.commands.main import main

DESCRIPTION = {"model_class": "transformers.Any", "config": "{}", "generation_config": None, "tokenizer": None}
OF_ANOTHER_RELEASE = {
    "a field more": (DESCRIPTION | {"adapters": 2}, "ModelDescription", "adapters"),
    "a field less": ({"config": "{}", "generation_config": None, "tokenizer": None}, "ModelDescription", "model_class"),
    "a field more of the base": (
        DESCRIPTION | {"base": '{"path": "a/b", "revision": "main"}'},
        "ModelSpec",
        "revision",
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", OF_ANOTHER_RELEASE)
def test_a_description_with_other_fields_is_refused_with_the_checkpoint_and_the_field(name, tmp_path, capsys):
    description, kind, field = OF_ANOTHER_RELEASE[name]
    file = tmp_path / "last.ckpt"
    torch.save({"pytorch-lightning_version": "2.6.0", "state_dict": {}, "models": {"policy": description}}, file)
    assert main(["export", str(file), "--to", str(tmp_path / "model")]) == 2
    message = capsys.readouterr().err
    assert f"Checkpoint {str(file)!r} was saved by a different release of lightrl" in message
    assert f"field {field!r} of the policy's {kind} differs from this release. Export it with the release" in message
    assert not (tmp_path / "model").exists()
