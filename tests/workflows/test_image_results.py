"""Images in results of tools: image parts of the tool's turn, whose features engine and trainer see alike."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from chat_texts import WRITES_IMAGES, chat_prompt, chat_tokenizer, play
from images_cases import BLUE, HALF, IMAGE_TOKEN, RED, TOKENS_EACH, image_reader, image_spec, with_images
from moe_cases import engine_of
from tiny import char_tokenizer, gradients

from lightrl import GRPO, PromptDataModule, Trainer
from lightrl.engines import FakeEngine, LocalEngine
from lightrl.engines.engine import Completion
from lightrl.errors import RolloutError
from lightrl.experience import Experience
from lightrl.models.images import read_image
from lightrl.rollout.runner import TrajectoryRunner
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.testing import QUIET
from lightrl.trajectory import JsonObject, Prompt, Sampling, Trajectory
from lightrl.weights import bucketed
from lightrl.workflows import MultiTurn, ToolEnvironment
from lightrl.workflows.multi_turn.conversation import Conversation, TurnRenderer
from lightrl.workflows.multi_turn.workflow import answer_or_replay
from lightrl.workflows.tools import ToolCall, read_parts
from lightrl.workflows.workflow import TurnLog

SAMPLING = Sampling(max_new_tokens=6, stop_token_ids=tuple(range(8, 17)))
IMAGES = [RED, BLUE, HALF]


def camera() -> list[dict[str, str]]:
    """Takes a photo."""
    return [{"type": "text", "text": "12"}, {"type": "image", "image": IMAGES[0]}]


class Photos(ToolEnvironment):
    """Answers each turn with the next image."""

    def __init__(self, images: Sequence[str] = IMAGES) -> None:
        self.images = list(images)

        def camera() -> list[dict[str, str]]:
            """Takes a photo."""
            return [{"type": "text", "text": "12"}, {"type": "image", "image": self.images.pop(0)}]

        super().__init__([camera], parser=lambda completion: [ToolCall("camera")])


def workflow(template: str | None = WRITES_IMAGES, **settings: Any) -> MultiTurn:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = template
    made = MultiTurn(tokenizer, Photos, **{"max_turns": 3, **settings})
    made.template.image_reader = image_reader()
    return made


def prompts() -> list[Prompt]:
    """Two without an image, one with one, rendered."""
    text = [{"role": "user", "content": "1+2"}]
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "3"}]}]
    return [
        Prompt("a", messages=text, token_ids=[4, 14, 5, 13]),
        Prompt("b", messages=shown, token_ids=[*[IMAGE_TOKEN] * TOKENS_EACH, 6, 13], images=(HALF,)),
        Prompt("c", messages=text),
    ]


def sampled(workflow: MultiTurn, num_samples: int = 6) -> list[Trajectory | RolloutError]:
    """Trajectories of a tiny policy with random weights, as a run samples them."""

    async def run(engine: LocalEngine) -> list[Trajectory | RolloutError]:
        results = []
        runner = TrajectoryRunner(engine, workflow)
        for number, prompt in enumerate(prompts()):
            async for sample, result in runner.run_group(prompt, range(num_samples), SAMPLING, 7, str(number)):
                if isinstance(result, Trajectory):
                    result.group_id, result.sample, result.reward = number, sample, float(sample)
                results.append(result)
        return results

    with engine_of(image_spec().load_model(), max_batch=8) as engine:
        return asyncio.run(run(engine))


@pytest.fixture(scope="module")
def trajectories() -> list[Trajectory]:
    """Those with images in their results; a sampled image token before an image drops a trajectory."""
    results = sampled(workflow())
    errors = [str(result) for result in results if isinstance(result, RolloutError)]
    assert all("has a stray image token (id 2) before an image in a result of the tool 'camera'" in e for e in errors)
    found = [result for result in results if isinstance(result, Trajectory) and result.images]
    assert {item.prompt.id for item in found} == {"a", "b", "c"}
    return found


def experience_of(trajectories: list[Trajectory]) -> Experience:
    return with_images(Experience.from_trajectories(trajectories), trajectories, image_reader())


def test_a_results_image_is_a_part_of_the_tools_turn_and_of_the_trajectory(trajectories):
    one = next(item for item in trajectories if len(item.turns) == 3 and item.prompt.id == "b")
    first, second, third = one.turns
    result = [4, 5, *[IMAGE_TOKEN] * TOKENS_EACH, 13]  # 1 2, the image, =
    assert list(one.token_ids[first.end : second.start]) == result
    assert list(one.token_ids[second.end : third.start]) == result
    assert (one.prompt.images, list(one.images)) == ((HALF,), [RED, BLUE])
    assert not any(one.loss_mask[first.end : second.start])


@pytest.mark.parametrize("form", ["rectangles", "shared_rows", "packed", None])
@torch.no_grad()
def test_the_engines_logprobs_are_the_trainers_after_an_image_in_a_result(trajectories, form):
    experience = experience_of(trajectories)
    model = SingleModel(image_spec().load_model(), LogprobSettings(), form=form)
    (outputs,) = model.forward([experience])
    assert torch.allclose(outputs.logprobs, experience.behavior_logprobs, atol=1e-5)
    other = experience_of([replace(item, images=[BLUE] * len(item.images)) for item in trajectories])
    (without,) = model.forward([other])
    assert (without.logprobs - outputs.logprobs).abs().max() > 0.1


def test_the_gradient_does_not_depend_on_how_rows_share_a_prompt(trajectories):
    def gradient(form: str) -> dict[str, torch.Tensor]:
        model = image_spec().load_model()
        SingleModel(model, LogprobSettings(), form=form).forward_backward(
            [experience_of(trajectories)],
            lambda part, out: (out.logprobs.sum(1) * part.rewards).sum(),
            torch.Tensor.backward,
        )
        return gradients(model)

    plain = gradient("rectangles")
    for form in ("shared_rows", "packed"):
        for name, value in gradient(form).items():
            assert torch.allclose(value, plain[name], atol=1e-4 * max(1.0, float(plain[name].abs().max()))), name


class Digits(PromptDataModule):
    def make_prompts(self, split: str) -> list[Prompt]:
        return [replace(prompt, token_ids=None) for prompt in prompts()]


class PhotoGRPO(GRPO):
    def reward(self, trajectory: Trajectory) -> float:
        return float(trajectory.sample)

    def on_experience_ready(self, experience: Any) -> None:
        self.num_images = (experience.image_rows >= 0).sum(1)


def test_a_run_trains_on_images_of_results(tmp_path):
    module = PhotoGRPO(
        image_spec(),
        group_size=4,
        sampling=SAMPLING,
        workflow=lambda tokenizer: MultiTurn(tokenizer, Photos, max_turns=3),
    )
    trainer = Trainer(**(QUIET | {"max_steps": 1, "default_root_dir": tmp_path, "limit_val_batches": 0}))
    trainer.fit(module, Digits(None, batch_size=3, chat_template=WRITES_IMAGES))
    assert module.num_images.max() > 1
    assert trainer.callback_metrics["policy/kl_behavior_nats"] < 1e-6


def test_images_travel_with_their_trajectory(trajectories):
    one = trajectories[0]
    assert list(Trajectory.from_bytes(one.to_bytes()).images) == list(one.images)
    assert Trajectory.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_without_a_chat_template_the_image_token_stands_where_the_image_does():
    conversation = Conversation(workflow(None).template, Prompt("a", token_ids=[4]))
    conversation.add_completion(Completion([5, 1], [-1.0, -1.0], [0, 0], "stop"))
    observed = conversation.encode_observation([{"role": "tool", "content": camera()}])
    assert observed.token_ids == [4, 5, *[IMAGE_TOKEN] * TOKENS_EACH]


def test_an_image_that_the_policy_did_not_read_is_not_in_the_trajectory():
    conversation = Conversation(workflow().template, prompts()[0])
    for _ in range(2):
        conversation.add_completion(Completion([5, 1], [-1.0, -1.0], [0, 0], "stop"))
        conversation.add_observation(conversation.encode_observation([{"role": "tool", "content": camera()}]))
    assert conversation.trajectory([0.0, 1.0], is_truncated=True, metrics={}).images == [RED]


def test_a_file_is_read_before_the_environment_deletes_it(tmp_path):
    file = tmp_path / "screen.png"
    read_image(RED).save(file)
    conversation = Conversation(workflow().template, prompts()[0])
    conversation.add_completion(Completion([5, 1], [-1.0, -1.0], [0, 0], "stop"))
    content = [{"type": "image", "image": str(file)}]
    (image,) = conversation.encode_observation([{"role": "user", "content": content}]).images
    file.unlink()
    assert torch.equal(image_reader().read([image]).pixel_values, image_reader().read([RED]).pixel_values)


@pytest.mark.parametrize("key", ["image", "path"])
def test_a_resume_shows_the_image_that_the_run_showed(key, tmp_path):
    class Screen:
        def step(self, text: str) -> list[JsonObject]:
            return [{"role": "tool", "content": [{"type": "image", key: str(tmp_path / "screen.png")}]}]

        def state_dict(self) -> JsonObject:
            return {}

        def load_state_dict(self, prompt: Prompt, state: JsonObject) -> None: ...

    read_image(RED).save(tmp_path / "screen.png")
    log = TurnLog()
    (message,) = asyncio.run(answer_or_replay(log, Screen(), "step", prompts()[0], "go", timeout_s=5.0))
    (tmp_path / "screen.png").unlink()
    resumed = TurnLog(log.answers)
    (again,) = asyncio.run(answer_or_replay(resumed, Screen(), "step", prompts()[0], "go", timeout_s=5.0))
    assert again == message
    shown = image_reader().read([again["content"][0]["image"], RED]).pixel_values
    assert torch.equal(shown[0], shown[1])


def test_mcps_content_is_text_or_parts():
    image = {"type": "image", "data": RED.partition(",")[2], "mimeType": "image/png"}
    sound = {"type": "audio", "data": "", "mimeType": "audio/wav"}
    text = {"type": "text", "text": "a"}
    assert read_parts([text, sound], is_error=False) == "a\n(audio, not shown)"
    shown = read_parts([text, image], is_error=False)
    assert shown == [{"type": "text", "text": "a\n"}, {"type": "image", "image": RED}]
    with pytest.raises(ValueError, match=r"a\n\(image, not shown\)"):
        read_parts([text, image], is_error=True)
    file = {"type": "resource", "resource": {"uri": "file:///a", "text": "body"}}
    assert read_parts([text, file], is_error=False, structured={"a": 1}) == "a\nbody"
    with pytest.raises(ValueError, match=r"^body$"):
        read_parts([file], is_error=True)
    link = {"type": "resource_link", "name": "b", "uri": "file:///b"}
    assert read_parts([link], is_error=False) == "b file:///b"
    scan = {"type": "resource", "resource": {"uri": "file:///c", "blob": "AA=="}}
    assert read_parts([scan, image], is_error=False, structured={"n": "ä"}) == [
        {"type": "text", "text": "(resource, file:///c, not shown)\n"},
        {"type": "image", "image": RED},
        {"type": "text", "text": '{"n": "ä"}\n'},
    ]
    with pytest.raises(ValueError, match="gave no reason"):
        read_parts([], is_error=True)


def test_a_long_text_beside_an_image_is_cut():
    environment = ToolEnvironment([camera], parser=lambda completion: [ToolCall("camera")], max_result_chars=1)
    messages: Any = asyncio.run(environment.step("go"))[0]
    assert messages[0]["content"] == [{"type": "text", "text": "1… (2 characters, cut)"}, camera()[1]]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("template", "image", "says"),
    [
        (WRITES_IMAGES, "data:image/png;base64,AAAA", r"'camera': Image 'data:.*cannot be read"),
        (
            WRITES_IMAGES.replace("<unk>", ""),
            RED,
            r"'camera': It needs one image token .* a chat template that renders",
        ),
        (WRITES_IMAGES, "https://example.com/a.png", "'camera': .*not a web address"),
    ],
    ids=["no image", "a template without images", "a web address"],
)
def test_an_image_that_cannot_be_shown_drops_the_trajectory_and_names_the_tool(template, image, says):
    made = workflow(template)
    made.make_environment = lambda: Photos([image])
    engine = FakeEngine(script=lambda prompt, sampling, sample: [5, 9])
    engine.start(image_spec().load_config())
    engine.load_weights(bucketed([("weight", torch.zeros(1))], 8), weight_version=0)
    with pytest.raises(RolloutError, match="The policy cannot read an image in a result of the tool " + says):
        asyncio.run(play(made, engine, prompts()[0], SAMPLING))


@pytest.mark.bad_input
def test_a_policy_without_images_is_told_the_tool():
    conversation = Conversation(TurnRenderer(chat_tokenizer()), chat_prompt())
    conversation.add_completion(Completion([40, 2], [-1.0, -1.0], [0, 0], "stop"))
    with pytest.raises(RolloutError, match=r"result of the tool 'camera': Got 1 image, but .* only token ids.*llava"):
        conversation.encode_observation([{"role": "tool", "name": "camera", "content": camera()}])
