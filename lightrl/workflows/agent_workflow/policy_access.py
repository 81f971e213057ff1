"""PolicyAccess: serves the policy to evaluation tools. Requests are independent, and nothing is trained on.

    POST <base_url>/chat/completions   rendered and parsed like an agent's request, each in a new AgentSession
    POST <base_url>/completions        continues text or token ids; `echo` with `logprobs` adds the prompt's logprobs

Unlike an agent, the client may set temperature, top_p and seed. `sampling` contains the defaults of all settings.
Source: https://platform.openai.com/docs/api-reference/completions.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.trajectory import JsonMapping, JsonObject, Prompt, Sampling, sampling_seed
from lightrl.workflows.agent_workflow.chat_protocol import ChatExchange
from lightrl.workflows.agent_workflow.completion_parser import completion_parser
from lightrl.workflows.agent_workflow.protocol import (
    AgentRequest,
    Answer,
    Exchange,
    Refusals,
    RequestRefused,
    RequestRules,
)
from lightrl.workflows.agent_workflow.session import AgentSession, EncodedRequest, cut_completion
from lightrl.workflows.multi_turn import TurnRenderer

_SAMPLED = "temperature top_p seed"
_DEFAULT_TOKENS = 16  # the default of OpenAI's API
TopLogprobs = list[dict[str, float] | None]  # for each token: text → logprob, of this token and of the most likely one


def _sampling_of(fields: JsonMapping) -> JsonObject:
    """Returns the request's sampling settings; refuses values that are not numbers."""
    settings = {name: fields[name] for name in _SAMPLED.split() if name in fields}
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int if name == "seed" else int | float):
            raise RequestRefused(f"{name} must be a number, got {value!r:.80}.")
    return settings


class SampledChatExchange(ChatExchange):
    """A request to `chat/completions` that may set temperature, top_p and seed."""

    served = f"{ChatExchange.served} {_SAMPLED}"

    def read(self) -> AgentRequest:
        return replace(super().read(), sampling=_sampling_of(self.fields))


@dataclass(frozen=True)
class TextRequest(AgentRequest):
    prompts: Sequence[str | list[int]] = ()
    has_echo: bool = False


@dataclass(frozen=True)
class EncodedPrompts:
    request: TextRequest
    prompts: list[list[int]]  # token ids

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


@dataclass(frozen=True)
class TextAnswer(Answer):
    """One choice; `echoed` and the first entries of the other fields belong to the prompt, if it is echoed."""

    echoed: str = ""
    tokens: Sequence[str] = ()  # one text per token; empty unless logprobs are requested
    logprobs: Sequence[float | None] = ()
    top_logprobs: Sequence[dict[str, float] | None] = ()


class CompletionsExchange(Exchange):
    """A request to `completions`."""

    last_line = "data: [DONE]\n\n"
    served = f"prompt max_tokens n stop logprobs echo stream_options user {_SAMPLED}"
    refused: ClassVar[Refusals] = {
        "suffix": (("",), "Leave it out."),
        "best_of": ((1,), "Leave it out, or set n."),
        "logprobs": ((False, 0, 1), "Set it to 1 for the logprobs of the tokens, and of the most likely ones."),
    }

    def read(self) -> TextRequest:
        prompt, num = self.fields.get("prompt"), self.fields.get("max_tokens", _DEFAULT_TOKENS)
        is_one = isinstance(prompt, str) or (isinstance(prompt, list) and all(type(each) is int for each in prompt))
        prompts: Any = [prompt] if is_one else prompt
        if not isinstance(prompts, list) or not prompts or not all(map(_is_prompt, prompts)):
            raise RequestRefused(f"prompt must be text, token ids, or a list of either, got {prompt!r:.80}.")
        has_echo = bool(self.fields.get("echo", False))
        if not isinstance(num, int) or isinstance(num, bool) or num < (0 if has_echo else 1):
            raise RequestRefused(f"max_tokens must be an integer >= 1, or 0 with echo, got {num!r:.80}.")
        return TextRequest(
            [],
            max_new_tokens=num,
            wants_logprobs=self.fields.get("logprobs") not in (None, False),
            stop=self.stop_of("stop"),
            num_choices=self.num_choices(),
            model=self.model,
            sampling=_sampling_of(self.fields),
            prompts=prompts,
            has_echo=has_echo,
        )

    def body(self, answer: Answer) -> JsonObject:
        answers = (answer, *answer.siblings)
        num_generated = sum(len(one.completion.token_ids) for one in answers)
        num_prompt = sum(one.num_prompt_tokens for one in answers[:: self.request.num_choices])
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_generated}
        usage["total_tokens"] = num_prompt + num_generated
        choices = [_choice(index, one) for index, one in enumerate(answers) if isinstance(one, TextAnswer)]
        version = f"weight-version-{max([-1, *answer.completion.weight_versions])}"
        named = {"id": f"cmpl-{self.id}", "object": "text_completion", "created": self.created, "model": self.model}
        return {**named, "system_fingerprint": version, "choices": choices, "usage": usage}

    def start_events(self, num_prompt_tokens: int) -> list[JsonObject]:
        return []

    def events(self, answer: Answer) -> Iterator[JsonObject]:
        yield self.body(answer)


def _is_prompt(value: object) -> bool:
    is_ids = isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
    return is_ids or (isinstance(value, str) and bool(value))


def _choice(index: int, answer: TextAnswer) -> JsonObject:
    logprobs = None
    if answer.tokens:
        starts = itertools.accumulate(map(len, answer.tokens), initial=0)
        offsets = [start for start, _ in zip(starts, answer.tokens, strict=False)]
        logprobs = {"tokens": answer.tokens, "token_logprobs": answer.logprobs, "top_logprobs": answer.top_logprobs}
        logprobs["text_offset"] = offsets
    text, reason = answer.echoed + answer.content, answer.completion.finish_reason
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


@dataclass(eq=False)
class PolicyAccess:
    """The policy behind a base_url of `OpenAIEndpoint`, in place of an agent's session.

    Args:
        engine: an engine that has been started and has weights. It may be called from any event loop.
        renderer: renders messages for the policy's tokenizer; has the end-of-turn ids.
        sampling: defaults for the settings that requests leave out; includes the policy's stop tokens.
        max_tokens: the model's context, which prompt and completion share.
    """

    engine: RolloutEngine
    renderer: TurnRenderer
    sampling: Sampling
    max_tokens: int
    rules: RequestRules = field(default_factory=RequestRules)

    def __post_init__(self) -> None:
        self.items: dict[str, JsonObject] = {}
        self.parser = completion_parser(self.renderer.tokenizer, None, None)
        self._numbers = itertools.count()  # numbers the completions, to derive their seeds
        self._scoring = asyncio.Lock()

    async def prepare(self, request: AgentRequest) -> EncodedRequest | EncodedPrompts:
        """Encodes a request; raises RequestRefused if it cannot be served."""
        if not isinstance(request, TextRequest):
            if self.renderer.chat_template is None:
                raise RequestRefused("The policy's tokenizer has no chat template. Send completions instead.")
            return await self._session(request).prepare(request)
        if request.has_echo and request.wants_logprobs and not self.engine.reads_prompts:
            raise RequestRefused(
                f"{type(self.engine).__name__} does not return a prompt's most likely tokens, so echo with logprobs "
                "needs LocalEngine. `lightrl serve --policy CHECKPOINT` uses it."
            )
        tokenizer: Any = self.renderer.tokenizer
        prompts = [list(tokenizer(each).input_ids) if isinstance(each, str) else each for each in request.prompts]
        vocabulary = range(len(tokenizer))
        for ids in prompts:
            if len(ids) + min(1, request.max_new_tokens or 0) > self.max_tokens or not ids:
                raise RequestRefused(
                    f"A prompt of {len(ids)} tokens leaves no room for an answer in the context of {self.max_tokens}.",
                    code="context_length_exceeded",
                )
            if request.has_echo and not all(each in vocabulary for each in ids):
                raise RequestRefused(f"Token ids must be below {len(tokenizer)}, got {max(ids)}.")
        return EncodedPrompts(request, prompts)

    async def answer(self, encoded: EncodedRequest | EncodedPrompts) -> Answer:
        """Waits for the engine and returns the first choice, with the others as its `siblings`."""
        if isinstance(encoded, EncodedRequest):
            return await self._session(encoded.request).answer(encoded)
        choices = [ids for ids in encoded.prompts for _ in range(encoded.request.num_choices)]
        first, *siblings = await asyncio.gather(*(self._continue(encoded.request, ids) for ids in choices))
        return replace(first, siblings=siblings)

    def close(self) -> None:
        """Does nothing: requests in flight end with their connections."""

    def _session(self, request: AgentRequest) -> AgentSession:
        async def generate(
            token_ids: list[int], *, max_new_tokens: int | None = None, grammar: str = "", **attached: Any
        ) -> Completion:
            num = max_new_tokens or self.sampling.max_new_tokens
            if request.max_new_tokens is None:
                num = min(num, self.sampling.max_new_tokens)
            return await self._generate(request, token_ids, num, grammar, **attached)

        prompt = Prompt("evaluation", messages=request.messages)
        return AgentSession(prompt, generate, self.renderer, self.parser, self.max_tokens, rules=self.rules)

    async def _generate(
        self, request: AgentRequest, token_ids: list[int], num: int, grammar: str = "", **attached: Any
    ) -> Completion:
        settings = {**request.sampling}
        number = next(self._numbers)
        seed = sampling_seed(settings.pop("seed", self.sampling.seed), "evaluation", number)
        shortest = 0 if grammar else min(num, self.sampling.min_new_tokens)
        try:
            sampling = replace(self.sampling, max_new_tokens=num, min_new_tokens=shortest, grammar=grammar, **settings)
            self.engine.check_sampling(sampling)
            (completion,) = await self.engine.generate(
                token_ids, sampling.with_seed(seed), session=f"evaluation-{number}", **attached
            )
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        return completion

    async def _continue(self, request: TextRequest, ids: list[int]) -> TextAnswer:
        """Continues one prompt up to a stop text; adds logprobs if requested, and the prompt's if it is echoed."""
        num = min(request.max_new_tokens or 0, self.max_tokens - len(ids))
        completion = Completion([], [], [], "length")
        if num > 0:
            completion = await self._generate(request, ids, num)
        text, stopped_by = self.renderer.text_of(completion.token_ids), None
        if stops := [(at, stop) for stop in request.stop if (at := text.find(stop)) >= 0]:
            at, stopped_by = min(stops)
            lengths = range(1, len(completion.token_ids) + 1)
            kept = next(num for num in lengths if stopped_by in self.renderer.text_of(completion.token_ids[:num]))
            text, completion = text[:at], cut_completion(completion, kept, "stop")
        answer = TextAnswer(completion, text, "", [], len(ids), stopped_by=stopped_by)
        if request.has_echo:
            answer = replace(answer, echoed=self.renderer.decode(ids))
        if not request.wants_logprobs:
            return answer
        tokens, logprobs = self._texts(completion.token_ids), [float(each) for each in completion.logprobs]
        is_greedy = request.sampling.get("temperature", self.sampling.temperature) == 0  # each token is the likeliest
        top: TopLogprobs = [{token: each} if is_greedy else None for token, each in zip(tokens, logprobs, strict=True)]
        if not request.has_echo:
            return replace(answer, tokens=tokens, logprobs=logprobs, top_logprobs=top)
        async with self._scoring:
            scored, top_scored = await in_thread(self._prompt_logprobs, ids, name="lightrl-score")
        return replace(
            answer, tokens=[*self._texts(ids), *tokens], logprobs=[*scored, *logprobs], top_logprobs=[*top_scored, *top]
        )

    def _prompt_logprobs(self, ids: list[int]) -> tuple[list[float | None], TopLogprobs]:
        """Returns each token's logprob and the most likely token's, at temperature 1; None for the first token."""
        if len(ids) == 1:
            return [None], [None]
        table = self.engine.log_probabilities(ids).float().cpu()  # [T - 1, V]
        chosen = table.gather(1, table.new_tensor(ids[1:]).long()[:, None])[:, 0].tolist()
        values, likeliest = table.max(dim=1)
        names = zip(self._texts(ids[1:]), chosen, self._texts(likeliest.tolist()), values.tolist(), strict=True)
        return [None, *chosen], [None, *({token: own, other: best} for token, own, other, best in names)]

    def _texts(self, ids: Sequence[int]) -> list[str]:
        return [each.decode(errors="replace") for each in self.renderer.token_bytes(ids)]
