"""Trace in a real run: what its files have, its summary, and that the run is as without it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from digit_reward import token_reward
from tiny_run import BATCH_SIZE, GROUP_SIZE, POLICY, Digits, TinyGRPO, are_equal, make_trainer, weights

from lightrl import GRPO, ReferenceKL, Sampling, Trace
from lightrl.trace.spans import in_microbatch_spans


def test_a_traced_run_has_every_phase_generation_reward_and_microbatch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(tmp_path, callbacks=[Trace(max_cost=1.0)])
    trainer.fit(TinyGRPO(num_minibatches=2), datamodule=Digits())
    events = json.loads((tmp_path / "trace" / "trace.json").read_text())
    names = [event["name"] for event in events]
    assert [name for name in names if name.startswith("iteration")] == [f"iteration {num}" for num in (1, 2, 3)]
    for phase in ("rollout", "score", "update", "sync"):
        found = [event for event in events if event.get("cat") == "phase" and event["name"] == phase]
        assert len(found) == 3, phase
    assert names.count("generate") == names.count("reward") == 3 * BATCH_SIZE * GROUP_SIZE
    assert names.count("forward") == names.count("backward") == 3 * 2
    assert "next batch from the loader" in names
    assert any(event["ph"] == "C" and "host in update" in event["args"] for event in events)
    summary = json.loads((tmp_path / "trace" / "summary.json").read_text())
    assert summary["iterations"] == 2
    assert summary["look_first_at"] in summary["gain"]
    assert summary["gain"].keys() == {"rollout", "reward", "score", "update", "sync", "data"}
    first = summary["look_first_at"]
    assert summary["areas_s"][first] == max(summary["areas_s"][name] for name in summary["gain"])
    assert summary["gain"][first] == pytest.approx(
        summary["total_s"] / (summary["total_s"] - summary["areas_s"][first])
    )
    printed = capsys.readouterr().out
    assert f"Look first at {first}: without it an iteration would be {summary['gain'][first]:.2f}x as fast." in printed
    assert summary["memory_peak_mib"].keys() == {"rollout", "score", "update", "sync"}
    assert all(peaks["host"] > 100 for peaks in summary["memory_peak_mib"].values())  # torch alone takes more
    assert "Memory of rank 0 in MiB\n  peak of each phase: " in printed
    assert "models: policy parameters " in printed


def test_the_memory_of_roles_is_that_of_their_tensors(tmp_path: Path) -> None:
    reference, sampling = ReferenceKL(0.1, POLICY), Sampling(max_new_tokens=2)
    module = GRPO(POLICY, reference=reference, reward=token_reward, group_size=2, sampling=sampling)
    make_trainer(tmp_path, callbacks=[Trace(max_cost=1.0)]).fit(module, datamodule=Digits())
    sizes = json.loads((tmp_path / "trace" / "summary.json").read_text())["memory_of_roles_mib"]
    assert sizes.keys() == {"policy", "reference"}
    for role, kinds in sizes.items():
        held = sum(parameter.nbytes for parameter in getattr(module, role).parameters()) / 2**20
        assert kinds["parameters"] == pytest.approx(held, abs=0.01)
        moments = 2 * held if role == "policy" else 0  # AdamW's
        assert kinds["optimizer"] == pytest.approx(moments, abs=0.01)


def test_tracing_changes_no_number(tmp_path: Path) -> None:
    trained = []
    for callbacks in ([], [Trace(max_cost=1.0)]):
        module = TinyGRPO()
        trainer = make_trainer(tmp_path, callbacks=callbacks)
        trainer.fit(module, datamodule=Digits())
        trained.append(weights(module))
    assert are_equal(*trained)
    assert "start" not in vars(trainer.profiler)  # as Lightning made it


def test_a_failed_run_leaves_the_iteration_it_failed_in(tmp_path: Path) -> None:
    class Failing(TinyGRPO):
        def on_minibatch_end(self, *args: Any) -> None:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        make_trainer(tmp_path, callbacks=[Trace(max_cost=1.0)]).fit(Failing(), datamodule=Digits())
    text = (tmp_path / "trace" / "rank-00000.json").read_text()
    update = next(json.loads(line.rstrip(",\n")) for line in text.splitlines() if '"update","cat":"phase"' in line)
    assert update["args"] == {"error": "RuntimeError"}
    assert in_microbatch_spans(max, print) == (max, print)  # nothing is kept any more


def test_a_disk_that_is_full_ends_the_trace_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "trace").write_text("in the way")
    trainer = make_trainer(tmp_path, callbacks=[Trace()])
    trainer.fit(TinyGRPO(), datamodule=Digits())
    assert trainer.global_step == 3
    assert "The trace cannot be written" in caplog.text


@pytest.mark.parametrize("settings", [{"max_cost": 0.0}, {"max_cost": 1.5}, {"max_mib": 0}])
def test_impossible_bounds_are_refused(settings: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Trace(**settings)
