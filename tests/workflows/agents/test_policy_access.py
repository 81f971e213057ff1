"""The policy as an OpenAI URL for evaluation tools, with the openai client, beside transformers' own numbers."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
import torch
from agent_cases import SAMPLING, TEMPLATE, scripted, user
from chat_texts import CHATML, END, chat_tokenizer
from openai import DefaultHttpxClient, OpenAI
from transformers import AutoConfig, AutoModelForCausalLM

from lightrl.engines import LocalEngine, RolloutEngine
from lightrl.testing import TINY_CONFIG
from lightrl.weights import Bucket
from lightrl.workflows.agent_workflow import PolicyAccess, serving_policy
from lightrl.workflows.multi_turn import TurnRenderer

TOKENIZER = chat_tokenizer(CHATML)
PROMPT = "hello"


@contextlib.contextmanager
def client_of(engine: RolloutEngine, template: str = TEMPLATE, **settings: Any) -> Iterator[OpenAI]:
    renderer = TurnRenderer(chat_tokenizer(template))
    access = PolicyAccess(engine, renderer, replace(SAMPLING, temperature=0.0, max_new_tokens=8), 64)
    http_client = DefaultHttpxClient(verify=False)
    with (
        serving_policy(access) as (url, key),
        OpenAI(**{"base_url": url, "api_key": key, "http_client": http_client, "max_retries": 0, **settings}) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def policy() -> Iterator[tuple[Any, LocalEngine]]:
    """A model with random weights, and an engine that has them."""
    values = {**TINY_CONFIG, "vocab_size": len(TOKENIZER), "eos_token_id": END}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    engine = LocalEngine()
    engine.start(model.config)
    engine.load_weights([Bucket(dict(model.named_parameters()), is_last=True)], weight_version=7)
    yield model, engine
    engine.close()


def table(model: Any, ids: list[int]) -> torch.Tensor:
    """The logprobs of each next token, [T, V]."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)


def greedy(model: Any, ids: list[int], num: int) -> list[int]:
    generated: list[int] = []
    while len(generated) < num and END not in generated:
        generated.append(int(table(model, ids + generated)[-1].argmax()))
    return generated


def test_an_echoed_prompt_has_the_logprobs_of_the_model_and_of_its_likeliest_tokens(policy: Any) -> None:
    model, engine = policy
    ids = [list(TOKENIZER(text).input_ids) for text in (PROMPT, "hello hello")]
    with client_of(engine) as client:
        answer = client.completions.create(
            model="policy", prompt=ids, max_tokens=1, temperature=0, logprobs=1, echo=True
        )
        text = client.completions.create(model="policy", prompt=PROMPT, max_tokens=0, logprobs=1, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.system_fingerprint == "weight-version-7"
    for one, prompt in zip(answer.choices, ids, strict=True):
        sampled = greedy(model, prompt, 1)
        rows = table(model, prompt + sampled)[:-1]
        expected = rows.gather(1, torch.tensor((prompt + sampled)[1:])[:, None])[:, 0].tolist()
        assert one.logprobs.token_logprobs[0] is None
        assert one.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-5)
        best = [max(each.values()) for each in one.logprobs.top_logprobs[1:]]
        assert best == pytest.approx(rows.max(1).values.tolist(), abs=1e-5)
        # lm-eval asks by equality whether a token is the likeliest
        is_greedy = [own == top for own, top in zip(one.logprobs.token_logprobs[1:], best, strict=True)]
        assert is_greedy == (rows.argmax(1) == torch.tensor((prompt + sampled)[1:])).tolist()
    (one,) = text.choices
    assert one.text == PROMPT
    assert len(one.logprobs.tokens or []) == len(ids[0])


def test_completions_and_chats_continue_as_the_model_and_sample_as_the_request_asks(policy: Any) -> None:
    model, engine = policy
    ids = list(TOKENIZER(PROMPT).input_ids)
    rendered = TOKENIZER.apply_chat_template([user("hi")], add_generation_prompt=True, tokenize=False)
    with client_of(engine, CHATML) as client:
        ask = {"model": "policy", "prompt": PROMPT, "max_tokens": 6}
        text = client.completions.create(**ask).choices[0]
        drawn = [client.completions.create(**ask, temperature=1.5, seed=seed, n=3) for seed in (1, 2)]
        chat = client.chat.completions.create(model="policy", messages=[user("hi")], max_tokens=6, logprobs=True)
        stream = list(client.completions.create(**ask, stream=True))
        assert [each.id for each in client.models.list()] == ["policy"]
    expected = greedy(model, ids, 6)
    assert text.text == TurnRenderer(TOKENIZER).text_of(expected)
    assert text.finish_reason == ("stop" if END in expected else "length")
    assert stream[0].choices[0].text == text.text
    texts = [choice.text for one in drawn for choice in one.choices]
    assert len(texts) == 6
    assert len(set(texts)) > 1
    asked = list(TOKENIZER(rendered, add_special_tokens=False).input_ids)
    answered = greedy(model, asked, 6)
    assert chat.choices[0].message.content == TurnRenderer(TOKENIZER).text_of(answered)
    logprobs = chat.choices[0].logprobs
    rows = table(model, asked + answered)[len(asked) - 1 : -1]
    assert [each.logprob for each in logprobs.content or []] == pytest.approx(rows.max(1).values.tolist(), abs=1e-5)


def test_a_stop_text_ends_a_completion_and_its_tokens() -> None:
    with client_of(scripted("one two\nthree")) as client:
        choice = client.completions.create(model="policy", prompt="hi", max_tokens=8, stop=["\n"], logprobs=1).choices[
            0
        ]
    assert (choice.text, choice.finish_reason) == ("one two", "stop")
    assert "".join(choice.logprobs.tokens or []) == "one two\n"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"prompt": ""}, "prompt must be text"),
        ({"prompt": [[5], []]}, "prompt must be text"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, or 0 with echo"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"temperature": -1}, "temperature must be >= 0"),
        ({"logprobs": 5}, "logprobs=5 is not supported"),
        ({"prompt": [5] * 64}, "leaves no room for an answer in the context of 64"),
        ({"echo": True, "logprobs": 1}, "FakeEngine does not return a prompt's most likely tokens"),
        ({"model": "other"}, "There is no model 'other'"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_the_reason(body: dict[str, Any], problem: str) -> None:
    with client_of(scripted("one")) as client, pytest.raises(openai.APIStatusError, match=problem):
        client.post("/completions", body={"model": "policy", "prompt": "hi", **body}, cast_to=object)


def test_a_wrong_key_and_agents_protocols_are_refused() -> None:
    with client_of(scripted("one"), api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.completions.create(model="policy", prompt="hi")
    with client_of(scripted("one")) as client, pytest.raises(openai.NotFoundError, match="responses is not served"):
        client.responses.create(model="policy", input="hi")
