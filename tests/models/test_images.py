"""Images from a prompt's strings to gradients: rows keep their own, whatever the cut, the form and the engine."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from images_cases import BLUE, HALF, IMAGE_TOKEN, RED, TOKENS_EACH, image_spec, image_trajectories
from tiny import gradients, tiny_spec

from lightrl.algorithms import GRPO
from lightrl.engines import LocalEngine
from lightrl.engines.servers.request import CompletionDraft, RequestImages
from lightrl.engines.sglang.generation import request_of
from lightrl.experience import Experience
from lightrl.models.images import ImageReader, data_url, input_embeddings, read_image, with_images
from lightrl.strategies.single import LogprobSettings, SingleModel
from lightrl.trajectory import Group, Prompt, Sampling, Trajectory
from lightrl.weights import bucketed


def image_reader() -> ImageReader:
    actual = ImageReader.of(image_spec().load_config())
    return actual


def image_experience(**settings: int) -> Experience:
    trajectories = image_trajectories(**settings)
    return with_images(Experience.from_trajectories(trajectories), trajectories, image_reader())


def slow_logprobs(experience: Experience, images: list[tuple[str, ...]]) -> torch.Tensor:
    """[B, T], one row at a time, with Hugging Face's own way of putting images in their places.

    Hugging Face takes every image token for an image; those of completions are shown as the token they are.
    """
    model, read = image_spec().load_model(), image_reader()
    logprobs = torch.zeros(experience.token_ids.shape)
    for row, length in enumerate(experience.lengths.tolist()):
        ids = experience.token_ids[row, :length]
        embeddings = model.get_input_embeddings()(ids[None]).clone()
        if images[row]:
            features = model.get_image_features(pixel_values=read.pixel_values(images[row])).pooler_output
            embeddings[0, 1 : 1 + TOKENS_EACH * len(images[row])] = torch.cat(list(features))
        said = torch.log_softmax(model(inputs_embeds=embeddings, use_cache=False).logits[0], -1)
        for t in experience.loss_mask[row, :length].nonzero()[:, 0].tolist():
            logprobs[row, t] = said[t - 1, ids[t]]
    return logprobs


def test_an_image_is_as_many_tokens_as_the_model_makes_of_it():
    model, read = image_spec().load_model(), image_reader()
    assert (read.tokens_each, read.image_token_id) == (TOKENS_EACH, IMAGE_TOKEN)
    ids = [5, *[IMAGE_TOKEN] * TOKENS_EACH, 6]
    expected = model(input_ids=torch.tensor([ids]), pixel_values=read.pixel_values([RED])).logits
    rows = torch.tensor([[0]])
    actual = input_embeddings(model, torch.tensor([ids]), read.pixel_values([RED]), rows)
    assert torch.allclose(model(inputs_embeds=actual).logits, expected, atol=1e-6)


def test_the_context_of_a_model_that_sees_images_is_that_of_its_text_model():
    module = GRPO(image_spec(), reward=len, sampling=Sampling(max_new_tokens=4))
    assert module.context_tokens == 64
    assert module.max_prompt_tokens == 60


def test_image_tokens_are_repeated_and_folded_back():
    read = image_reader()
    ids = read.expanded([3, IMAGE_TOKEN, 4, IMAGE_TOKEN, 5], 2, where="Row 1")
    assert ids == [3, *[IMAGE_TOKEN] * 4, 4, *[IMAGE_TOKEN] * 4, 5]
    assert read.expanded(ids, 2, where="Row 1") == ids
    assert read.collapsed([*ids, IMAGE_TOKEN], 2) == [3, IMAGE_TOKEN, 4, IMAGE_TOKEN, 5, IMAGE_TOKEN]
    with pytest.raises(ValueError, match=r"Row 1 needs one image token .* 1 images, got 2"):
        read.expanded([IMAGE_TOKEN, IMAGE_TOKEN], 1, where="Row 1")


@pytest.mark.parametrize("form", ["rectangles", "shared_keys", "shared_rows", "packed", None])
@torch.no_grad()
def test_logprobs_are_those_of_each_row_with_its_own_images(form):
    experience = image_experience()
    expected = slow_logprobs(experience, [item.prompt.images for item in image_trajectories()])
    model = SingleModel(image_spec().load_model(), LogprobSettings(), form=form)
    assert torch.allclose(next(iter(model.forward([experience]))).logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("form", ["rectangles", "shared_keys", "shared_rows", "packed"])
@torch.no_grad()
def test_the_images_of_two_rows_are_not_alike_to_the_policy(form):
    trajectories = image_trajectories(num_groups=2, group_size=1)
    same = [replace(trajectories[0], prompt=replace(trajectories[0].prompt, images=(i,))) for i in (RED, BLUE)]
    experience = with_images(Experience.from_trajectories(same), same, image_reader())
    (outputs,) = SingleModel(image_spec().load_model(), LogprobSettings(), form=form).forward([experience])
    logprobs = outputs.logprobs
    assert (logprobs[0] - logprobs[1]).abs().max() > 0.1


@pytest.mark.parametrize("form", ["rectangles", "shared_keys", "shared_rows", "packed"])
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
    shuffled = experience.select([6, 1, 3, 0, 7, 2, 5, 4])
    cut = gradient(shuffled.microbatch_rows(20)[1])
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
    with pytest.raises(ValueError, match=r"3 images, but the policy takes token ids only.*llava"):
        with_images(Experience.from_trajectories(trajectories), trajectories, None)


def test_a_file_and_a_data_url_are_the_same_image(tmp_path: Path):
    path = tmp_path / "half.png"
    read_image(HALF).save(path)
    assert torch.equal(image_reader().pixel_values([str(path)]), image_reader().pixel_values([HALF]))
    assert data_url(str(path)).startswith("data:image/png;base64,")
    for wrong in (str(tmp_path / "none.png"), "data:image/png;base64,!!", "data:image/png,abc"):
        with pytest.raises(ValueError, match="cannot be read"):
            read_image(wrong)


def engine_completions(prompts: list[Prompt], *, reload: bool = False, max_batch: int = 8) -> list[Trajectory]:
    """Two completions of each prompt, sampled side by side; with `reload` the weights come again in between."""
    model = image_spec().load_model()
    engine = LocalEngine(max_batch=max_batch, threads=1)
    engine.start(model.config)

    def load(version: int) -> None:
        engine.load_weights(bucketed(model.named_parameters(), 2**20), weight_version=version)

    async def run() -> list[Trajectory]:
        asked = [
            asyncio.ensure_future(
                engine.generate(
                    prompt.token_ids, Sampling(max_new_tokens=12, seed=3), session="s", n=2, images=prompt.images
                )
            )
            for prompt in prompts
        ]
        if reload:
            await asyncio.sleep(0.01)
            await asyncio.to_thread(load, 1)
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

    try:
        load(0)
        return asyncio.run(run())
    finally:
        engine.close()


def prompts_with_images() -> list[Prompt]:
    """Two of them differ in the image alone."""
    prompts = [item.prompt for item in image_trajectories(group_size=1)]
    return [*prompts, replace(prompts[0], id="other", images=(BLUE,))]


@pytest.mark.parametrize(("reload", "max_batch"), [(False, 8), (False, 3), (True, 8)])
@torch.no_grad()
def test_the_engines_logprobs_are_the_trainers(reload, max_batch):
    trajectories = engine_completions(prompts_with_images(), reload=reload, max_batch=max_batch)
    experience = with_images(Experience.from_trajectories(trajectories), trajectories, image_reader())
    (outputs,) = SingleModel(image_spec().load_model(), LogprobSettings()).forward([experience])
    assert torch.allclose(outputs.logprobs, experience.behavior_logprobs, atol=1e-5)
    assert trajectories[0].completion_ids != trajectories[-2].completion_ids


def test_an_engine_refuses_images_that_have_no_place_or_no_file():
    for prompt, problem in (
        (Prompt(id="a", token_ids=[5, IMAGE_TOKEN], images=(RED,)), "image tokens for each of its 1 images, got 1"),
        (Prompt(id="b", token_ids=[IMAGE_TOKEN] * TOKENS_EACH, images=("nowhere.png",)), "cannot be read"),
    ):
        with pytest.raises(ValueError, match=problem):
            engine_completions([prompt])


def test_a_request_to_sglang_has_one_image_token_and_the_image_data():
    read = image_reader()
    prompt = [5, *[IMAGE_TOKEN] * TOKENS_EACH, 6]
    draft = CompletionDraft(prompt, Sampling(max_new_tokens=4), images=RequestImages(read.collapsed(prompt, 1), [RED]))
    draft.token_ids, draft.logprobs, draft.weight_versions = [7], [-1.0], [0]
    body = request_of(draft, "r", "key")
    assert (body["input_ids"], body["image_data"]) == ([5, IMAGE_TOKEN, 6, 7], [RED])
    assert "image_data" not in request_of(CompletionDraft(prompt, Sampling()), "r", "key")
