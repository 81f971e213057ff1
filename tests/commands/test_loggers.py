"""Weights & Biases, MLflow, TensorBoard and CSV from YAML, each read back from its own store.

They get the scalars, the whole configuration, tables of samples, the learning curve and, where there are artifacts, the
exported model. Each run has a folder of its own whichever logger comes first.
"""

import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from transformers import AutoModelForCausalLM
from waits import comes_true

from lightrl.callbacks.learning_curve import log_plot
from lightrl.callbacks.loggers import log_settings, log_table
from lightrl.commands.main import main

# MLflow 3.17 calls pandas 3 and SQLAlchemy 2.1 by what they are about to drop.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
    pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated"),  # TensorBoard
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
]
COLUMNS = ["prompt", "completion", "reward", "accuracy", "format", "advantage", "length", "staleness"]
CALLBACKS = [
    {"class_path": "StalenessControl", "init_args": {"max_staleness": 1}},
    {"class_path": "TrajectoryLog", "init_args": {"every_n_iterations": 1, "table_every_n_iterations": 1}},
    {"class_path": "LearningCurve"},
    {"class_path": "HuggingFaceExport", "init_args": {"to": "out/exported", "every_n_iterations": 1}},
]


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        inner = flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value}
        found |= inner
    return found


@pytest.fixture
def run(settings: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `fit` with a logger, tables, image, export and a reward's parts; nothing may reach another host."""
    connect = socket.socket.connect

    def own_host_only(self: socket.socket, address: Any) -> None:
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"), address
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", own_host_only)

    def fit(class_path: str, *args: str, **init_args: Any) -> None:
        settings["trainer"] |= {"logger": [{"class_path": class_path, "init_args": init_args}], "callbacks": CALLBACKS}
        settings["model"]["init_args"]["reward"] = "tiny_rewards.in_parts"
        assert main(["fit", "--config", config(settings), *args]) == 0

    return fit


def test_csv_and_tensorboard_have_the_whole_configuration(settings: Any, config: Any) -> None:
    assert main(["fit", "--config", config(settings)]) == 0
    folder = Path("lightning_logs/version_0")
    own, given = (flat(yaml.safe_load((folder / name).read_text())) for name in ("hparams.yaml", "config.yaml"))
    assert own["model/init_args/lr"] == given["model/init_args/lr"]
    assert own["trainer/max_steps"] == 2
    assert own["model/class_path"].endswith("GRPO")


def test_tensorboard_has_scalars_tables_and_the_image(run: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html

    run("TensorBoardLogger", save_dir="runs")
    events = EventAccumulator("runs/lightning_logs/version_0").Reload()
    assert [event.step for event in events.Scalars("rollout/reward")] == [1, 2]
    tables = events.Tensors("samples/text_summary")
    assert [event.step for event in tables] == [1, 2]
    shown = markdown_to_safe_html(tables[0].tensor_proto.string_val[0])
    assert [name for name in COLUMNS if f"<pre>{name}</pre>" not in shown] == []
    (image,) = events.Images("learning_curve")
    assert image.step == 2
    assert image.encoded_image_string.startswith(b"\x89PNG")


def test_tensorboard_shows_what_a_model_wrote_as_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html

    logger = TensorBoardLogger(tmp_path)
    hostile = "<script>alert(1)</script> | *bold*\n\n# title\n```</pre></td>"
    log_table([logger], "samples", [{"completion": hostile, "reward": 1 / 3}], 0)
    logger.finalize("success")
    (table,) = EventAccumulator(logger.log_dir).Reload().Tensors("samples/text_summary")
    shown = markdown_to_safe_html(table.tensor_proto.string_val[0])
    assert "&lt;script&gt;alert(1)&lt;/script&gt; | *bold*\n\n# title\n```&lt;/pre&gt;&lt;/td&gt;</pre>" in shown
    assert "<pre>0.3333</pre>" in shown


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Offline, with all of its files in the test's folder; its process ends with the test."""
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    yield wandb
    wandb.teardown()


def records_of(run_folder: Path) -> list[Any]:
    """What the run's transaction log holds: after 7 bytes LevelDB's log format, blocks with parts of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = run_folder.glob("*.wandb")
    content, block, place, record = file.read_bytes(), 32768, 7, b""
    assert content[:4] == b":W&B"
    records = []
    while place + 7 <= len(content):
        if block - place % block < 7:  # no room for another header
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        if place + 7 + length > len(content):  # is being written
            break
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole one, or its last part
            records.append(Record.FromString(record))
            record = b""
    return records


def nested(values: dict[tuple[str, ...], str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for (*folders, name), value in values.items():
        place = made
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = json.loads(value)
    return made


def config_of(records: list[Any]) -> dict[str, Any]:
    """The values of the run, and of each update since, by top-level name."""
    updates = [record.run.config.update for record in records if record.WhichOneof("record_type") == "run"]
    updates += [record.config.update for record in records if record.WhichOneof("record_type") == "config"]
    return {item.key or item.nested_key[0]: json.loads(item.value_json) for update in updates for item in update}


@pytest.mark.extra
def test_weights_and_biases_has_everything(run: Any, wandb: Any) -> None:
    run("WandbLogger", save_dir="runs", project="tiny", id="first", log_model="all")
    wandb.finish()
    (offline,) = Path("runs/wandb").glob("offline-run-*-first")
    assert comes_true(lambda: "exit" in [record.WhichOneof("record_type") for record in records_of(offline)])
    records = records_of(offline)  # wandb's own process has written the last one
    rows = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    history = [nested({tuple(item.nested_key) or (item.key,): item.value_json for item in row}) for row in rows]
    assert [row["trainer/global_step"] for row in history if "rollout/reward" in row] == [1, 2]

    config = config_of(records)
    assert config["model"]["init_args"]["group_size"] == 2
    assert config["trainer"]["callbacks"][1]["init_args"]["every_n_iterations"] == 1

    tables = [row["samples"] for row in history if "samples" in row]
    assert [row["trainer/global_step"] for row in history if "samples" in row] == [1, 2]
    first = json.loads((offline / "files" / tables[0]["path"]).read_text())
    assert first["columns"] == COLUMNS
    assert len(first["data"]) == 4
    assert all(isinstance(row[0], str) and row[2] == row[3] + row[4] for row in first["data"])

    (image,) = [row["learning_curve"] for row in history if "learning_curve" in row]
    (name,) = image["filenames"]
    assert (offline / "files" / name).read_bytes() == Path("runs/tiny/first/learning_curve.png").read_bytes()

    exports = [record.request.log_artifact.artifact for record in records if record.request.HasField("log_artifact")]
    exports += [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
    exports = [artifact for artifact in exports if artifact.name == "policy-first"]
    assert [set(artifact.aliases) for artifact in exports] == [
        {"latest", "iteration-1"},
        {"latest", "iteration-2"},
        {"latest", "iteration-2"},
    ]
    files = {entry.path: Path(entry.local_path) for entry in exports[-1].manifest.contents}
    assert {path.name for path in Path("out/exported").iterdir()} == set(files)
    assert files["model.safetensors"].read_bytes() == Path("out/exported/model.safetensors").read_bytes()


@pytest.fixture(params=["sqlite", pytest.param("files", marks=pytest.mark.extra)])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses it, with a sentence that says so
    return f"sqlite:///{tmp_path}/mlflow.db" if request.param == "sqlite" else f"file:{tmp_path}/mlruns"


def downloaded(client: Any, run_id: str, name: str) -> Path:
    return Path(client.download_artifacts(run_id, name))


@pytest.mark.extra
def test_mlflow_has_everything(store: str, run: Any, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    run("MLFlowLogger", tracking_uri=store, artifact_location=f"file:{tmp_path}/artifacts", log_model="all")
    client = MlflowClient(store)
    (experiment,) = [one for one in client.search_experiments() if one.name == "lightning_logs"]
    (found,) = client.search_runs([experiment.experiment_id])
    run_id = found.info.run_id
    assert [value.step for value in client.get_metric_history(run_id, "rollout/reward")] == [1, 2]

    parameters = found.data.params
    assert parameters["model/init_args/group_size"] == "2"
    assert parameters["trainer/callbacks/1/init_args/every_n_iterations"] == "1"
    assert yaml.safe_load(downloaded(client, run_id, "config.yaml").read_text())["trainer"]["max_steps"] == 2

    table = json.loads(downloaded(client, run_id, "samples.json").read_text())
    assert table["columns"] == ["iteration", *COLUMNS]
    assert [row[0] for row in table["data"]] == [1] * 4 + [2] * 4

    image = downloaded(client, run_id, "learning_curve.png").read_bytes()
    folder = tmp_path / ("mlruns" if store.startswith("file") else ".") / experiment.experiment_id / run_id
    assert image == (folder / "learning_curve.png").read_bytes()
    assert (folder / "config.yaml").exists()
    assert (folder / "trajectories" / "iteration-000001.jsonl").exists()
    assert not (tmp_path / "config.yaml").exists()

    assert sorted(item.path for item in client.list_artifacts(run_id, "policy")) == [
        "policy/iteration-000001",
        "policy/iteration-000002",
    ]
    folders = downloaded(client, run_id, "policy/iteration-000002"), "out/exported"
    ours, exported = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    assert ours.keys() == exported.keys()
    assert all(bool((ours[name] == exported[name]).all()) for name in ours)


@pytest.mark.extra
def test_mlflow_takes_any_setting(store: str, tmp_path: Path) -> None:
    logger = MLFlowLogger(tracking_uri=store, artifact_location=f"file:{tmp_path}/artifacts")
    many = {f"number_{index}": index for index in range(250)}
    odd = {"a|b (c)": 1, "..": 2, "": 3, "deep": {"x" * 200: {"y" * 200: "z" * 9000}}, "betas": [0.9, 0.95], "none": []}
    log_settings([logger], {"many": many, "odd": odd, "lists": [[{"lr": 1.0}], 2]}, "odd: 1")
    log_settings([logger], {"many": {"number_0": "changed", "new": 1}}, "odd: 2")  # the run is continued
    parameters = logger.experiment.get_run(logger.run_id).data.params
    assert {name: parameters[f"many/{name}"] for name in many} == {name: str(value) for name, value in many.items()}
    assert parameters["many/new"] == "1"
    assert (parameters["odd/a_b _c_"], parameters["odd/_"], parameters["odd/betas"]) == ("1", "3", "[0.9, 0.95]")
    assert (parameters["lists/0/0/lr"], parameters["lists/1"]) == ("1.0", "2")
    assert any(name.endswith("y" * 200) and value == "z" * 250 for name, value in parameters.items())
    assert downloaded(logger.experiment, logger.run_id, "config.yaml").read_text() == "odd: 2"


@pytest.mark.extra
def test_a_store_that_fails_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = MLFlowLogger(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", artifact_location="unknown://bucket/folder")
    log_table([logger], "samples", [{"reward": 1.0}], 0)
    log_plot([logger], tmp_path / "learning_curve.png", 0)
    assert "MLFlowLogger could not log the table samples: " in caplog.text
    assert "MLFlowLogger could not log learning_curve.png: " in caplog.text
    assert "The run continues, and its folder has the data." in caplog.text


class SharedFolder(DummyLogger):
    """All runs have one save_dir, and each a version."""

    num_runs = 0
    name, version, save_dir = "tiny", "", None

    def __init__(self, save_dir: str | None) -> None:
        super().__init__()
        self.save_dir = save_dir

    @property
    def experiment(self) -> Any:
        if not self.version:
            SharedFolder.num_runs += 1
            self.version = f"run{SharedFolder.num_runs}"
        return super().experiment


@pytest.mark.parametrize(
    "save_dir", ["runs", pytest.param(None, marks=pytest.mark.extra)], ids=["a folder", "a server"]
)
def test_two_runs_do_not_mix_where_a_logger_has_one_folder_for_all(save_dir: Any, run: Any) -> None:
    for _ in range(2):
        run("test_loggers.SharedFolder", save_dir=save_dir)
    folders = sorted(Path(save_dir or ".", "tiny").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert (folder / "config.yaml").exists()
        assert (folder / "trajectories" / "iteration-000001.jsonl").exists()
    assert not Path(save_dir or ".", "trajectories").exists()


def test_a_run_with_csv_as_second_logger_has_one_folder_and_goes_on_from_it(settings: Any, config: Any) -> None:
    loggers = [
        {"class_path": "test_loggers.SharedFolder", "init_args": {"save_dir": "runs"}},
        {"class_path": "CSVLogger", "init_args": {"save_dir": "runs"}},
    ]
    settings["trainer"]["logger"] = loggers
    assert main(["fit", "--config", config(settings)]) == 0
    folder = Path("runs/lightning_logs/version_0")
    assert {"config.yaml", "metrics.csv", "checkpoints"} <= {path.name for path in folder.iterdir()}
    assert (folder / "checkpoints" / "last.ckpt").exists()
    settings["trainer"]["max_steps"] = 3
    assert main(["fit", "--config", config(settings), "--ckpt_path", "last"]) == 0
    rows = Path("runs/lightning_logs/version_1/metrics.csv").read_text().splitlines()
    step = rows[0].split(",").index("step")
    assert {row.split(",")[step] for row in rows[1:]} == {"3"}
