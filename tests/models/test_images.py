"""Images from a prompt's strings to gradients: rows keep their own, whatever the cut, the form and the engine."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from images_cases import (
    BLUE,
    FAMILIES,
    HALF,
    IMAGE_TOKEN,
    RED,
    TOKENS_EACH,
    UNPACKED,
    WIDE,
    image_reader,
    image_spec,
    image_trajectories,
    with_images,
)  # fmt: skip
from moe_cases import engine_of
from tiny import gradients, tiny_spec

from lightrl.algorithms import GRPO
from lightrl.engines import LocalEngine
from lightrl.engines.servers.request import CompletionDraft
from lightrl.engines.sglang.generation import request_of
from lightrl.errors import RolloutError
from lightrl.experience import Experience
from lightrl.models.images import Attachments, ImageReader, data_url, image_inputs, read_image
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.trajectory import Group, Prompt, Sampling, Trajectory
from lightrl.weights import bucketed

QUICK = ("qwen3_vl", "gemma3")
SLOW = [name for name in FAMILIES if name not in ("llava", *QUICK)]


def image_experience(family: str = "llava", **settings: int) -> Experience:
    trajectories = image_trajectories(family=family, **settings)
    return with_images(Experience.from_trajectories(trajectories), trajectories, image_reader(family))


@torch.no_grad()
def slow_logprobs(experience: Experience, images: list[tuple[str, ...]], family: str = "llava") -> torch.Tensor:
    """[B, T], one row at a time, as Hugging Face's own forward gives them.

    It takes every image token for an image, so one of a completion is shown as token 0, with the same embedding.
    """
    model = image_spec(family).load_model()
    embedding = model.get_input_embeddings().weight
    embedding[0] = embedding[IMAGE_TOKEN]
    logprobs = torch.zeros(experience.token_ids.shape)
    for row, length in enumerate(experience.lengths.tolist()):
        ids = experience.token_ids[row, :length]
        shown = torch.where(experience.loss_mask[row, :length] & (ids == IMAGE_TOKEN), 0, ids)[None]
        inputs = {}
        if images[row]:
            table = image_reader(family).read(images[row])
            inputs = {"pixel_values": table.pixel_values}
            kinds = (shown == IMAGE_TOKEN).long()
            if family.startswith("qwen"):
                inputs |= {"image_grid_thw": table.image_grids, "mm_token_type_ids": kinds.int()}
            elif family == "gemma3":
                inputs["token_type_ids"] = kinds
        model.base_model.rope_deltas = None
        logits = model(input_ids=shown, use_cache=False, **inputs).logits[0]
        for t in experience.loss_mask[row, :length].nonzero()[:, 0].tolist():
            logprobs[row, t] = torch.log_softmax(logits[t - 1], -1)[ids[t]]
    return logprobs


def test_an_image_is_as_many_tokens_as_the_model_makes_of_it():
    model, read = image_spec().load_model(), image_reader()
    assert (read.tokens_each, read.image_token_id) == (TOKENS_EACH, IMAGE_TOKEN)
    ids = [5, *[IMAGE_TOKEN] * TOKENS_EACH, 6]
    table = read.read([RED])
    expected = model(input_ids=torch.tensor([ids]), pixel_values=table.pixel_values).logits
    actual = image_inputs(model, torch.tensor([ids]), table)
    assert torch.allclose(model(**actual).logits, expected, atol=1e-6)


def test_the_context_of_a_model_that_sees_images_is_that_of_its_text_model():
    module = GRPO(image_spec(), reward=len, sampling=Sampling(max_new_tokens=4))
    assert module.context_tokens == 64
    assert module.max_prompt_tokens == 60


def test_image_tokens_are_repeated_and_folded_back():
    read = image_reader()
    ids = read.expanded([3, IMAGE_TOKEN, 4, IMAGE_TOKEN, 5], [RED, BLUE], where="Row 1")
    assert ids == [3, *[IMAGE_TOKEN] * 4, 4, *[IMAGE_TOKEN] * 4, 5]
    assert read.expanded(ids, [RED, BLUE], where="Row 1") == ids
    assert read.expanded([IMAGE_TOKEN, IMAGE_TOKEN], [RED, BLUE], where="Row 1") == [IMAGE_TOKEN] * 8
    assert read.collapsed([*ids, IMAGE_TOKEN], [RED, BLUE]) == [3, IMAGE_TOKEN, 4, IMAGE_TOKEN, 5, IMAGE_TOKEN]
    with pytest.raises(ValueError, match=r"Row 1 needs one image token .* 1 images, got 2"):
        read.expanded([IMAGE_TOKEN, IMAGE_TOKEN], [RED], where="Row 1")


@pytest.mark.parametrize("times", [(1, 1), (8, 4)])
def test_two_images_of_a_grid_have_something_between_them(times):
    read = image_reader("qwen2_5_vl")
    first, second = ([IMAGE_TOKEN] * num for num in times)
    expanded = [*[IMAGE_TOKEN] * 8, 3, *[IMAGE_TOKEN] * 4]
    assert read.expanded([*first, 3, *second], [WIDE, RED], where="Row 1") == expanded
    with pytest.raises(ValueError, match="Row 1 has two adjacent images"):
        read.expanded([*first, *second], [WIDE, RED], where="Row 1")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.extra if name in SLOW else []) for name in FAMILIES]
)
@torch.no_grad()
def test_logprobs_of_each_family_are_hugging_faces_of_each_row_with_its_own_images(family):
    trajectories = image_trajectories(family=family)
    experience = image_experience(family)
    expected = slow_logprobs(experience, [item.prompt.images for item in trajectories], family)
    forms = ["rectangles", None, *(["packed"] if family not in UNPACKED else [])]
    for form in [*forms, *(["shared_rows"] if family == "llava" else [])]:
        model = SingleModel(image_spec(family).load_model(), LogprobSettings(), form=form)
        assert torch.allclose(next(iter(model.forward([experience]))).logprobs, expected, atol=1e-5), form


@pytest.mark.parametrize("form", ["rectangles", "shared_rows", "packed"])
@torch.no_grad()
def test_the_images_of_two_rows_are_not_alike_to_the_policy(form):
    trajectories = image_trajectories(num_groups=2, group_size=1)
    same = [replace(trajectories[0], prompt=replace(trajectories[0].prompt, images=(i,))) for i in (RED, BLUE)]
    experience = with_images(Experience.from_trajectories(same), same, image_reader())
    (outputs,) = SingleModel(image_spec().load_model(), LogprobSettings(), form=form).forward([experience])
    logprobs = outputs.logprobs
    assert (logprobs[0] - logprobs[1]).abs().max() > 0.1


@pytest.mark.parametrize("form", ["rectangles", "shared_rows", "packed"])
def test_microbatches_in_another_order_give_the_same_gradient(form):
    experience = image_experience()
    model = image_spec().load_model()
    parallel = SingleModel(model, LogprobSettings(), form=form)

    def gradient(parts):
        parallel.forward_backward(
            parts, lambda part, out: (out.logprobs.sum(1) * part.rewards).sum(), torch.Tensor.backward
        )
        return gradients(model)

    whole = gradient([experience])
    cut = gradient(experience.select([6, 1, 3, 0, 7, 2, 5, 4]).microbatch_rows(20)[1])
    assert whole.keys() == cut.keys()
    assert any("vision_tower" in name for name in whole)
    for name, value in whole.items():
        assert torch.allclose(cut[name], value, atol=1e-4 * max(1.0, float(value.abs().max()))), name


def test_an_image_of_several_rows_is_kept_once():
    assert len(image_experience(group_size=5).pixel_values) == 3


def test_text_alone_has_no_images():
    trajectories = [item for item in image_trajectories() if not item.prompt.images]
    experience = with_images(Experience.from_trajectories(trajectories), trajectories, None)
    assert experience.pixel_values is None
    assert "images" not in trajectories[0].to_json()["prompt"]


def test_groups_travel_with_their_images():
    trajectories = image_trajectories(num_groups=1)
    group = Group(0, trajectories[0].prompt, trajectories)
    assert Group.from_state(json.loads(json.dumps(group.state_dict()))) == group
    assert Trajectory.from_json(json.loads(json.dumps(trajectories[0].to_json()))) == trajectories[0]


def test_a_policy_that_takes_token_ids_only_refuses_images():
    assert ImageReader.of(tiny_spec().load_config()) is None
    trajectories = image_trajectories()
    with pytest.raises(ValueError, match=r"3 images, but the policy accepts only token ids.*llava"):
        with_images(Experience.from_trajectories(trajectories), trajectories, None)


def test_a_file_and_a_data_url_are_the_same_image(tmp_path: Path):
    path = tmp_path / "half.png"
    read_image(HALF).save(path)
    assert torch.equal(image_reader().read([str(path)]).pixel_values, image_reader().read([HALF]).pixel_values)
    assert data_url(str(path)).startswith("data:image/png;base64,")


def engine_completions(
    prompts: list[Prompt], *, reload: bool = False, max_batch: int = 8, family: str = "llava", temperature: float = 1.0
) -> list[Trajectory]:
    """Two completions of each prompt, sampled side by side; with `reload` the weights come again in between."""
    model = image_spec(family).load_model()

    async def run(engine: LocalEngine) -> list[Trajectory]:
        asked = [
            asyncio.ensure_future(
                engine.generate(
                    prompt.token_ids,
                    Sampling(max_new_tokens=12, seed=3 if temperature == 1 else number, temperature=temperature),
                    session="s",
                    n=2,
                    images=prompt.images,
                )
            )
            for number, prompt in enumerate(prompts)
        ]
        if reload:
            await asyncio.sleep(0.01)
            again = bucketed(model.named_parameters(), 2**20)
            await asyncio.to_thread(engine.load_weights, again, weight_version=1)
        found = []
        for group, completions in enumerate(await asyncio.gather(*asked)):
            prompt = prompts[group]
            for sample, item in enumerate(completions):
                start = len(prompt.token_ids)
                found.append(
                    Trajectory(
                        prompt=prompt,
                        group_id=group,
                        sample=sample,
                        token_ids=prompt.token_ids + item.token_ids,
                        loss_mask=[False] * start + [True] * len(item.token_ids),
                        behavior_logprobs=[0.0] * start + item.logprobs,
                        weight_versions=[-1] * start + item.weight_versions,
                        completion_ids=item.token_ids,
                        completion="",
                        reward=0.0,
                    )
                )
        return found

    with engine_of(model, max_batch=max_batch) as engine:
        return asyncio.run(run(engine))


@pytest.mark.parametrize(
    ("family", "reload", "max_batch", "temperature"),
    [
        ("llava", False, 8, 1.0),
        ("llava", True, 8, 1.0),
        *[(name, False, 3, 1.0) for name in ("llava", *QUICK)],
        *[pytest.param(name, False, 3, 1.0, marks=pytest.mark.extra) for name in SLOW],
        *[pytest.param(name, True, 3, 5.0, marks=pytest.mark.extra) for name in FAMILIES],
    ],
)
@torch.no_grad()
def test_the_engines_logprobs_are_the_trainers(family, reload, max_batch, temperature):
    settings = {"reload": reload, "max_batch": max_batch, "family": family, "temperature": temperature}
    prompts = [item.prompt for item in image_trajectories(group_size=1, family=family)]
    prompts.append(replace(prompts[0], id="other", images=(BLUE,)))  # differs in the image alone
    for _ in range(20 if reload else 1):
        trajectories = engine_completions(prompts, **settings)
        is_mixed = any({0, 1} <= set(item.weight_versions) for item in trajectories)
        if is_mixed:
            break
    assert is_mixed == reload
    if temperature > 1:  # the policy samples image tokens too
        assert any(IMAGE_TOKEN in item.completion_ids for item in trajectories if item.prompt.images)
    experience = with_images(Experience.from_trajectories(trajectories), trajectories, image_reader(family))
    (outputs,) = SingleModel(image_spec(family).load_model(), LogprobSettings(temperature)).forward([experience])
    assert torch.allclose(outputs.logprobs, experience.behavior_logprobs, atol=1e-5)
    first, other = trajectories[0], trajectories[-2]  # their prompts differ in the image alone
    assert list(first.behavior_logprobs) != list(other.behavior_logprobs)
    assert family == "gemma3" or first.completion_ids != other.completion_ids


def test_an_engine_refuses_images_that_have_no_place_or_no_file():
    for prompt, problem in (
        (Prompt(id="a", token_ids=[5, IMAGE_TOKEN], images=(RED,)), "4 image tokens for its 1 image, got 1"),
        (Prompt(id="b", token_ids=[IMAGE_TOKEN] * TOKENS_EACH, images=("nowhere.png",)), "cannot be read"),
    ):
        with pytest.raises(ValueError, match=problem):
            engine_completions([prompt])


def test_a_request_to_sglang_has_one_image_token_and_the_image_data():
    read = image_reader()
    prompt = [5, *[IMAGE_TOKEN] * TOKENS_EACH, 6]
    draft = CompletionDraft(prompt, Sampling(max_new_tokens=4), attachments=Attachments.of(read, prompt, [RED]))
    draft.token_ids, draft.logprobs, draft.weight_versions = [7], [-1.0], [0]
    body = request_of(draft, "r", "key")
    assert (body["input_ids"], body["image_data"]) == ([5, IMAGE_TOKEN, 6, 7], [RED])
    assert "image_data" not in request_of(CompletionDraft(prompt, Sampling()), "r", "key")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_request_to_sglang_has_one_image_token_for_each_image_whatever_its_size(family):
    read = image_reader(family)
    prompt = read.expanded([5, IMAGE_TOKEN, 6, IMAGE_TOKEN, 7], [WIDE, RED], where="It")
    assert prompt.count(IMAGE_TOKEN) == 8 + 4
    attachments = Attachments.of(read, prompt, [WIDE, RED])
    draft = CompletionDraft(prompt, Sampling(max_new_tokens=4), attachments=attachments)
    body = request_of(draft, "r", "key")
    assert (body["input_ids"], body["image_data"]) == ([5, IMAGE_TOKEN, 6, IMAGE_TOKEN, 7], [WIDE, RED])


def test_an_image_token_that_the_policy_sampled_drops_what_a_server_would_take_for_an_image():
    read = image_reader("qwen3_vl")
    prompt = read.expanded([5, IMAGE_TOKEN], [RED], where="It")
    attachments = Attachments.of(read, [*prompt, 6, IMAGE_TOKEN, 7], [RED])  # of an earlier turn
    with pytest.raises(RolloutError, match=r"sampled an image token \(id 2\)"):
        request_of(CompletionDraft(prompt, Sampling(), attachments=attachments), "r", "key")
    draft = CompletionDraft(prompt, Sampling(), attachments=Attachments.of(read, prompt, [RED]))
    draft.token_ids, draft.logprobs, draft.weight_versions = [IMAGE_TOKEN], [-1.0], [0]  # before an interruption
    with pytest.raises(RolloutError, match="sampled an image token"):
        request_of(draft, "r", "key")


def test_servers_refuse_images_of_gemma_3_with_the_reason():
    read = image_reader("gemma3")
    with pytest.raises(ValueError, match="a gemma3 model: they add line breaks"):
        Attachments.of(read, [IMAGE_TOKEN] * TOKENS_EACH, [RED])
