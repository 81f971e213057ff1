"""`max_staleness=0` through the asynchronous machinery is the plain loop: generate, reward, learn, load the weights."""

import statistics
from pathlib import Path
from typing import Any

import lightning as L
import torch
from tiny_run import EOS, GROUP_SIZE, Digits, TinyGRPO, are_equal, make_trainer, train, weights
from torch import Tensor

from lightrl import Experience, LocalEngine, RLCallback
from lightrl.engines.local.running_batch import uniforms
from lightrl.trajectory import sampling_seed


def test_behavior_logprobs_are_those_of_the_training_forward(tmp_path: Path) -> None:
    class Compare(RLCallback):
        def on_experience_ready(self, trainer: Any, module: Any, experience: Experience) -> None:
            (outputs,) = module.parallel_models["policy"].forward([experience])
            difference = (outputs.logprobs - experience.behavior_logprobs)[experience.loss_mask].abs()
            differences.append(float(difference.max()))

    differences: list[float] = []
    train(tmp_path, TinyGRPO(lr=0.1), callbacks=[Compare()])
    assert len(differences) == 3
    assert max(differences) < 1e-5


def test_the_engine_has_the_trainers_weights_after_each_sync(tmp_path: Path) -> None:
    class Compare(RLCallback):
        def on_weights_synced(self, trainer: Any, module: Any, weight_version: int) -> None:
            policy = module.policy.state_dict()
            served = trainer.engine.read_weights()
            assert trainer.engine.weight_version == trainer.weight_version == weight_version
            assert all(torch.equal(value, policy[name]) for name, value in served.items())
            assert {value.data_ptr() for value in served.values()}.isdisjoint(
                parameter.data_ptr() for parameter in module.policy.parameters()
            )
            versions.append(weight_version)

    versions: list[int] = []
    train(tmp_path, TinyGRPO(lr=0.1), engine=LocalEngine(), callbacks=[Compare()])
    assert versions == [0, 1, 2, 3]


def test_two_runs_with_one_seed_are_equal_to_the_bit_and_another_seed_differs(tmp_path, monkeypatch):
    def run(seed: int) -> TinyGRPO:
        monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that it is restored
        L.seed_everything(seed, verbose=False)
        module = TinyGRPO(num_minibatches=2, update_epochs=2)
        make_trainer(tmp_path).fit(module, datamodule=Digits())
        return module

    first, second, other = run(1), run(1), run(2)
    assert are_equal(weights(first), weights(second))
    assert all(
        are_equal(left.tensors(), right.tensors())
        for left, right in zip(first.experiences, second.experiences, strict=True)
    )
    assert not are_equal(weights(first), weights(other))


def test_the_machinery_gives_what_a_hand_written_loop_gives(tmp_path: Path) -> None:
    data, module = Digits(), TinyGRPO()
    make_trainer(tmp_path).fit(module, datamodule=data)
    plain = TinyGRPO()
    plain.configure_model()
    completions = train_by_hand(plain.policy, data.prompt_stream, num_iterations=3)
    for experience, expected in zip(module.experiences, completions, strict=True):
        rows = zip(experience.token_ids, experience.lengths, strict=True)
        assert [row[:length].tolist() for row, length in rows] == expected
    trained = weights(module)
    for name, value in plain.policy.state_dict().items():
        torch.testing.assert_close(trained[name], value, atol=2e-5, rtol=1e-4)


def train_by_hand(policy: Any, prompts: Any, num_iterations: int, lr: float = 1e-2) -> list[list[list[int]]]:
    """GRPO as a beginner would write it: one sequence at a time, the whole model for each token."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    history = []
    for iteration in range(num_iterations):
        sequences: list[list[int]] = []
        advantages: list[float] = []
        for position in (2 * iteration, 2 * iteration + 1):
            prompt = prompts[position]
            group = [
                generate(policy, prompt.token_ids, sampling_seed(0, f"{position}:{prompt.id}", sample))
                for sample in range(GROUP_SIZE)
            ]
            rewards = [sum(token == 7 for token in tokens[3:]) / len(tokens[3:]) for tokens in group]
            mean, std = statistics.mean(rewards), statistics.stdev(rewards)
            sequences += group
            advantages += [(reward - mean) / (std + 1e-5) for reward in rewards]
        num_tokens = sum(len(tokens) - 3 for tokens in sequences)
        terms = [
            -advantage * logprobs(policy, tokens)[2:].sum() / num_tokens
            for tokens, advantage in zip(sequences, advantages, strict=True)
        ]
        optimizer.zero_grad()
        torch.stack(terms).sum().backward()  # on-policy the ratio is 1 and its gradient that of the logprob
        optimizer.step()
        history.append(sequences)
    return history


@torch.no_grad()
def generate(policy: Any, prompt: list[int], seed: int, max_new_tokens: int = 6) -> list[int]:
    tokens = list(prompt)
    for uniform in uniforms(torch.tensor([seed]), 0, max_new_tokens)[0]:
        probabilities = policy(torch.tensor([tokens])).logits[0, -1].softmax(-1).double()
        tokens.append(int(torch.searchsorted(probabilities.cumsum(0), uniform * probabilities.sum(), right=True)))
        if tokens[-1] == EOS:
            break
    return tokens


def logprobs(policy: Any, tokens: list[int]) -> Tensor:
    """[T - 1], of each token but the first."""
    predicted = policy(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    return predicted.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
