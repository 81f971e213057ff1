"""`lightrl export` makes of a checkpoint the folder that the run's own model would have made."""

import pytest
import torch
from tiny_run import Digits, TinyGRPO, make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.commands.export import export_checkpoint
from lightrl.commands.main import main


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A run's module and its checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    made = TinyGRPO()
    trainer = make_trainer(folder, max_steps=2)
    trainer.fit(made, datamodule=Digits())
    checkpoint = folder / "run.ckpt"
    trainer.save_checkpoint(checkpoint)
    return made, checkpoint


def test_the_exported_folder_loads_bit_equal(finished_run, tmp_path):
    made, checkpoint = finished_run
    export_checkpoint(checkpoint, tmp_path / "model", tokenizer="tiny_run.tokenizer")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    trained = made.policy.state_dict()
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(loaded[name], trained[name]) for name in loaded)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == len(made.tokenizer)


def test_the_command_exports(finished_run, tmp_path):
    options = ["--to", str(tmp_path / "model"), "--tokenizer", "tiny_run.tokenizer"]
    assert main(["export", str(finished_run[1]), *options]) == 0
    assert (tmp_path / "model" / "config.json").exists()


def test_a_role_that_is_not_there_is_named_with_those_that_are(finished_run, tmp_path):
    with pytest.raises(ValueError, match=r"no role 'critic'. Set --role to one of \['policy'\]"):
        export_checkpoint(finished_run[1], tmp_path / "model", role="critic")


def test_a_folder_with_other_things_in_it_is_left_alone(finished_run, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("text")
    assert main(["export", str(finished_run[1]), "--to", str(tmp_path)]) == 2
    assert "holds 'thesis.tex'" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()
