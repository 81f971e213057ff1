from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from images_cases import PhotoChats, image_spec
from tiny import QUIET
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import lightrl
from lightrl.algorithms import SFT
from lightrl.data import ChatBatch, DataSource, SFTDataModule
from lightrl.models import ModelSpec
from lightrl.trajectory import Prompt

CONFIG = {
    "model_type": "qwen3", "vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32,
}  # fmt: skip
SCALED_HEAD = {**CONFIG, "model_type": "granite", "logits_scaling": 3.0}  # logits are more than the head's output


def digit_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", "+", *"0123456789"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_module(config: dict = CONFIG, **settings) -> SFT:
    spec = ModelSpec(config=config, tokenizer=f"{__name__}.digit_tokenizer")
    return SFT(spec, **{"lr": 0.01, **settings})


class Sums(SFTDataModule):
    def make_prompts(self, split: str) -> list:
        size = {"train": 14, "validation": 6, "test": 0}[split]
        numbers = range(size) if split == "train" else range(14, 14 + size)
        return [
            Prompt(
                id=f"{split}-{n}",
                messages=[{"role": "user", "content": f"{n % 10}+{n // 10}"}],
                fields={"answer": str(n % 10 + n // 10)},
            )
            for n in numbers
        ]


def make_trainer(tmp_path: Path, **settings) -> L.Trainer:
    return L.Trainer(**(QUIET | {"default_root_dir": tmp_path, "num_sanity_val_steps": 0} | settings))


def make_batch() -> ChatBatch:
    token_ids = torch.tensor([[4, 3, 5, 6, 1, 0, 0], [7, 3, 8, 3, 4, 9, 1]])
    loss_mask = torch.tensor([[0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1, 1]]).bool()
    return ChatBatch(token_ids, loss_mask)


@pytest.mark.parametrize("config", [CONFIG, SCALED_HEAD], ids=["plain head", "scaled logits"])
def test_the_loss_is_hugging_faces_cross_entropy_on_the_same_labels(config: dict, tmp_path: Path):
    module, batch = make_module(config), make_batch()
    module.trainer = make_trainer(tmp_path)
    module.configure_model()
    labels = batch.token_ids.where(batch.loss_mask, -100)
    expected = module.policy(input_ids=batch.token_ids, labels=labels).loss
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in module.policy.parameters()]
    module.zero_grad()
    loss = module.measure(batch)["loss_nats"].mean()
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for parameter, gradient in zip(module.policy.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("config", [CONFIG, SCALED_HEAD], ids=["plain head", "scaled logits"])
def test_validation_averages_over_the_tokens_of_all_batches(tmp_path: Path, config: dict):
    module, data = make_module(config), Sums(None, batch_size=4, validation_batch_size=4)
    (values,) = make_trainer(tmp_path).validate(module, data, verbose=False)
    losses, hits = [], []
    for batch in data.val_dataloader():
        log_probabilities = module.policy(input_ids=batch.token_ids).logits.log_softmax(-1)
        for row, column in batch.loss_mask.nonzero().tolist():
            token_id = batch.token_ids[row, column]
            losses.append(-log_probabilities[row, column - 1, token_id].item())
            hits.append(float(log_probabilities[row, column - 1].argmax() == token_id))
    assert values["val/loss_nats"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert values["val/token_accuracy_fraction"] == pytest.approx(sum(hits) / len(hits))


def unequal_chats() -> list[ChatBatch]:
    """Seven chats whose answers have 1 to 4 tokens, each a batch of its own."""
    lengths = torch.tensor([1, 4, 1, 2, 1, 1, 3])
    token_ids = torch.randint(3, 16, (7, 7), generator=torch.Generator().manual_seed(0))
    columns = torch.arange(7)
    masks = (columns >= 3) & (columns < 3 + lengths[:, None])
    return [ChatBatch(row[None], mask[None]) for row, mask in zip(token_ids, masks, strict=True)]


def joined(chats: list[ChatBatch]) -> ChatBatch:
    return ChatBatch(torch.cat([chat.token_ids for chat in chats]), torch.cat([chat.loss_mask for chat in chats]))


class Loader:
    """These batches, in this order; Lightning takes a bare list for several loaders."""

    def __init__(self, batches: list[ChatBatch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[ChatBatch]:
        return iter(self.batches)


class Gradients(L.Callback):
    """Of each update, as a callback sees them."""

    def __init__(self) -> None:
        self.found: list[list[torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: object) -> None:
        self.found.append([value.grad.clone() for value in pl_module.parameters() if value.grad is not None])


@pytest.mark.parametrize("num_batches", [2, 4])
def test_accumulated_batches_are_one_batch_of_all_their_tokens(tmp_path: Path, num_batches: int):
    """Two epochs of seven chats, four of them in an update; the last update of an epoch has fewer batches."""
    found, chats = [], unequal_chats()
    for batch_size, accumulated in [(4, 1), (4 // num_batches, num_batches)]:
        batches = [joined(chats[start : start + batch_size]) for start in range(0, 7, batch_size)]
        gradients = Gradients()
        trainer = make_trainer(tmp_path, max_epochs=2, accumulate_grad_batches=accumulated, callbacks=[gradients])
        module = make_module(lr_decay="constant")
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)  # noqa: B023
        trainer.fit(module, Loader(batches), Loader(chats))
        assert trainer.global_step == 4
        found.append(gradients.found)
    for one, several in zip(*found, strict=True):
        for expected, gradient in zip(one, several, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


class SaveEachStep(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / f"step-{trainer.global_step}.ckpt")


def test_a_run_resumed_at_any_step_ends_with_the_same_weights(tmp_path: Path):
    def run(steps: int, ckpt_path: Path | None = None, callbacks: Sequence[L.Callback] = ()) -> tuple[L.Trainer, SFT]:
        trainer, module = make_trainer(tmp_path, max_steps=steps, callbacks=callbacks), make_module(lr_decay="constant")
        trainer.fit(module, Sums(None, batch_size=4), ckpt_path=ckpt_path, weights_only=True)
        return trainer, module

    _, plain = run(9, callbacks=[SaveEachStep()])
    stopped, _ = run(6)  # in the middle of the second epoch, which Lightning then counts as finished
    stopped.save_checkpoint(tmp_path / "stopped.ckpt")
    for name in [*(f"step-{step}.ckpt" for step in range(1, 9)), "stopped.ckpt"]:
        _, resumed = run(9, tmp_path / name)
        for key, parameter in plain.policy.named_parameters():
            assert torch.equal(parameter, resumed.policy.get_parameter(key)), (name, key)


def learning_rates(num_steps: int, **settings: Any) -> list[float]:
    """The one of each step of a run, and the one after the last."""
    module = make_module(**settings)
    module.configure_model()
    module.trainer = SimpleNamespace(estimated_stepping_batches=num_steps)
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    rates = list(scheduler.get_last_lr()[:1])
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
        rates += scheduler.get_last_lr()[:1]
    return rates


def test_the_learning_rate_warms_up_and_decays_to_zero():
    factors = learning_rates(6, lr=1.0, warmup_steps=2, lr_decay="linear")
    assert factors == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])
    assert learning_rates(2, lr=1.0, lr_decay="cosine") == pytest.approx([1.0, 0.5, 0.0])


def test_decay_without_an_end_of_the_run_is_refused(tmp_path: Path):
    trainer = make_trainer(tmp_path, max_epochs=-1)
    with pytest.raises(ValueError, match=r"lr_decay='cosine' needs to know when the run ends"):
        trainer.fit(make_module(), Sums(None, batch_size=4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_decay": "sine"}, "lr_decay must be constant, linear or cosine, got 'sine'"),
        ({"warmup_steps": -1}, "warmup_steps must be >= 0, got -1"),
        ({"lr": -1.0}, r"lr must be >= 0, got -1\.0"),
        ({"betas": (0.9,)}, r"betas must be two numbers .* got \(0\.9,\)"),
    ],
    ids=["unknown decay", "negative warm-up", "negative rate", "one beta"],
)
def test_settings_that_mean_nothing_are_refused(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_module(**settings)


def test_several_labeled_validation_sources_have_a_loss_each(tmp_path: Path):
    files = {name: tmp_path / f"{name}.jsonl" for name in ("short", "long")}
    files["short"].write_text('{"question": "1+1", "answer": "2"}\n')
    files["long"].write_text('{"question": "5+6", "answer": "11"}\n')
    sources = [DataSource(str(path), label=name) for name, path in files.items()]
    data = SFTDataModule(
        None, sources, batch_size=2, chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    (actual,) = lightrl.Trainer(**(QUIET | {"default_root_dir": tmp_path})).validate(make_module(), data)
    both, short, long = (actual[f"val/loss_nats{name}"] for name in ("", "/short", "/long"))
    assert both == pytest.approx((2 * short + 3 * long) / 5)  # tokens, with the end token


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.extra), "llava"])
def test_images_of_prompts_are_read_as_hugging_face_reads_them(family: str, tmp_path: Path):
    module, data = SFT(image_spec(family)), PhotoChats(batch_size=3, shuffle=False, answer_column="answer")
    module.trainer = make_trainer(tmp_path)
    data.attach(module.tokenizer, image_reader=module.image_reader)
    data.setup("fit")
    module.configure_model()
    (batch,) = data.train_dataloader()
    expected, rows = [], data.prompts["train"]
    for row, prompt in enumerate(rows.at([0, 1, 2])):
        ids = batch.token_ids[row : row + 1]
        inputs = {}
        if prompt.images:
            table, kinds = module.image_reader.read(prompt.images), (ids == 2).int()
            inputs = {"pixel_values": table.pixel_values}
            if family == "qwen3_vl":
                inputs |= {"image_grid_thw": table.image_grids, "mm_token_type_ids": kinds}
            if family == "gemma3":
                inputs["token_type_ids"] = kinds
        logits = module.policy(input_ids=ids, **inputs).logits[0, :-1].detach().log_softmax(-1)
        expected += [float(logits[t - 1, ids[0, t]]) for t in batch.loss_mask[row].nonzero()[:, 0]]
    assert -module.measure(batch)["loss_nats"].detach() == pytest.approx(torch.tensor(expected), abs=1e-5)
    assert batch.share(1, 3).images.image_rows.tolist() == [[-1, -1]]
