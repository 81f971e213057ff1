"""An engine of a user's own that has `generate` and `load_weights` alone runs with everything that lightrl adds."""

import json
import math
import random
from typing import Any

import pytest
from tiny_run import CONFIG, EOS, Digits, TinyGRPO, make_trainer

from lightrl import DynamicSampling, RolloutEngine, StalenessControl, TrajectoryLog
from lightrl.callbacks.run_files import ProblemLog, RunFiles, StatusFile
from lightrl.engines import Completion
from lightrl.loops import devices_text


class OwnEngine(RolloutEngine):
    """Samples every token with the same chance."""

    async def generate(self, token_ids: Any, sampling: Any, *, session: str, n: int = 1) -> list[Completion]:
        draw = random.Random(sampling.seed)
        num = sampling.max_new_tokens
        tokens = [draw.choice(range(2, CONFIG["vocab_size"])) for _ in range(num - 1)] + [EOS]
        logprobs = [-math.log(CONFIG["vocab_size"])] * num
        return [Completion(tokens, logprobs, [self.weight_version] * num, "stop")] * n

    def load_weights(self, buckets: Any, *, weight_version: int) -> None:
        self.names = {name for bucket in buckets for name in bucket.tensors}
        self.weight_version = weight_version


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_it_trains_and_validates_with_each_callback(max_staleness: int, tmp_path: Any) -> None:
    engine, module = OwnEngine(), TinyGRPO()
    callbacks = [RunFiles(), StatusFile(), ProblemLog(), TrajectoryLog(), StalenessControl(max_staleness)]
    flags = {"limit_val_batches": 1, "val_check_interval": 1, "logger": True, "enable_progress_bar": True}
    trainer = make_trainer(tmp_path, engine=engine, callbacks=[*callbacks, DynamicSampling()], **flags)
    trainer.fit(module, Digits())
    assert trainer.global_step == engine.weight_version == 3
    assert len(engine.names) == len(list(module.policy.named_parameters()))
    status = json.loads(next(tmp_path.rglob("status*.json")).read_text())
    assert status["weight_version"] == 3
    assert status["servers"] == []
    assert devices_text(trainer) == "trainer cpu; OwnEngine"


def test_a_class_without_load_weights_is_no_engine() -> None:
    class Half(RolloutEngine):
        generate = OwnEngine.generate

    with pytest.raises(TypeError, match="load_weights"):
        Half()
