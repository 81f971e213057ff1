"""LLMJudge: a reward from a language model that follows a rubric, at any OpenAI-compatible endpoint.

reward:
  path: lightrl.rewards.LLMJudge
  arguments:
    url: http://127.0.0.1:30000/v1
    model: Qwen/Qwen3-8B
    rubric: "Rate the answer from 0 to 10. Question: {question} Answer: {completion} End with `Score: <number>`."
    score_range: [0, 10]
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import random
import re
import string
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightrl.checks.bounds import check_bounds, names_of
from lightrl.checks.printable import count_text
from lightrl.concurrency.streams import BUSY, body_of, retry_after_s
from lightrl.errors import RewardError
from lightrl.rewards.reward_result import label
from lightrl.trajectory import Trajectory, chat_as_text, split_thinking

if TYPE_CHECKING:
    import aiohttp

_MAX_WAIT_S = 8.0
_MAX_SHOWN = 300
_MAX_ANSWER_BYTES = 64 * 2**20


# The number after "score" and a colon or equals sign (`Score (0 to 10): **8**/10`, `score = 3 + 4 = 7`), or directly
# after "score"; a sign or point that could be part of the number is never skipped.
_SCORE = (
    r"(?i)score(?![a-z])(?:[^:=\n]{0,40}[:=](?:[\d\s.+*()-]*=)?)?(?:\\boxed|[^\w.,+\-−–]){0,5}"
    r"([-+−]?(?:\d++(?:\.\d++)?|\.\d++)(?:e-?\d++)?)"
)
_SCORE_AT_START = re.compile(_SCORE.replace("(?i)", r"(?i)\A", 1))  # scores in a comment after it do not count
# Text after a score, with or without its maximum, that makes the score ambiguous: `7-8`, `7,5`, `8/10 or maybe 9`.
_OR_ANOTHER = re.compile(
    r"(?i)(?:[ \t*]*(?:/|out of)\s*\d++|\s*points?\b)?+"
    r"(?:[\w,.]*[\d¼-¾]|[ \t*]*(?:[-–—~±,;|&]|\+/-|\(?(?:or|to|and|through|maybe|perhaps|possibly)\b)"
    r"[ \t*]*(?:(?:maybe|perhaps|possibly|even|an?)\s+)?[-+−]?\.?\d)"
)


class LLMJudge:
    """A reward function that asks a model for a score according to a rubric, and scales the score to [0, 1].

    At most `max_concurrent` requests run at the same time. Connection errors and status 408, 425, 429 and 5xx are
    retried with increasing pauses until `deadline_s`; any other error, or an answer without a score, raises RewardError
    immediately. Scores are cached, so the same prompt with the same completion is sent only once.

    Args:
        url: the endpoint's address without `/chat/completions`.
        model: the model's name at the endpoint.
        rubric: the user message, in which {completion} (without its thinking), {thinking}, {prompt} (the last message)
            and the prompt's fields are filled in. Thinking without an answer is not sent; it gets the lowest score.
        system: the system message; None sends no system message.
        score_pattern: a regular expression whose first group is the score; its last match counts. With {criteria}, it
            is applied to each criterion's line; by default, the score is the number after the name.
        criteria: the data column with each row's list of `{name: ..., description: ..., weight: 1}`. With {criteria} in
            the rubric, one answer scores all criteria, each in a line `name: score` or a table row; with {criterion},
            each criterion is a separate request. The reward is the weighted mean of the scores, scaled to [0, 1]; each
            scaled score is a metric. If the score for a criterion cannot be read, the trajectory is dropped.
        score_range: the scores that become the rewards 0 and 1; a score outside this range is an error.
        api_key_variable: the environment variable that contains the key; if it is not set, no key is sent.
        max_concurrent: maximum number of simultaneous requests per process.
        deadline_s: time for one trajectory, including all attempts; keep it below the reward's timeout.
        temperature, max_tokens: arguments for the request; None omits them, for models that refuse them.
        request: additional arguments for the request, such as `{max_completion_tokens: 2048, reasoning_effort: low}`.
        cache_size: number of scores to keep in memory.
        first_wait_s: pause before the second attempt; it doubles each time.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        rubric: str,
        system: str | None = None,
        score_pattern: str = _SCORE,
        criteria: str | None = None,
        score_range: Sequence[float] = (0.0, 10.0),
        api_key_variable: str = "OPENAI_API_KEY",
        max_concurrent: int = 16,
        deadline_s: float = 25.0,
        temperature: float | None = 0.0,
        max_tokens: int | None = 512,
        request: Mapping[str, object] | None = None,
        cache_size: int = 10_000,
        first_wait_s: float = 0.5,
    ) -> None:
        if len(score_range) != 2 or not score_range[0] < score_range[1]:
            raise ValueError(f"score_range must be two increasing numbers, got {list(score_range)}.")
        if re.compile(score_pattern).groups < 1:
            raise ValueError(f"score_pattern={score_pattern!r} must have a group around the score.")
        check_bounds(1, max_concurrent=max_concurrent, max_tokens=max_tokens)
        self._names = names_of(rubric, "rubric")
        self._criteria = criteria
        filled = {"criteria", "criterion"} & {*self._names}
        if (criteria is None and filled) or (criteria is not None and len(filled) != 1):
            raise ValueError(
                f"rubric must contain {{criteria}} or {{criterion}} if criteria names a column, and neither otherwise, "
                f"got criteria={criteria!r} and {sorted(filled)}."
            )
        if taken := {"model", "messages", "stream", "n"} & {*(request or {})}:
            raise ValueError(f"request must not contain {sorted(taken)}, which LLMJudge sets itself. Remove them.")
        self._url = url.rstrip("/") + "/chat/completions"
        self._rubric = rubric
        self._pattern = re.compile(score_pattern)
        self._low, self._high = score_range
        self._api_key_variable = api_key_variable
        self._deadline_s = deadline_s
        self._first_wait_s = first_wait_s
        arguments = {"model": model, "temperature": temperature, "max_tokens": max_tokens, **(request or {})}
        self._request = {name: value for name, value in arguments.items() if value is not None}
        self._messages = [{"role": "system", "content": system}] if system is not None else []
        self._max_concurrent = max_concurrent
        self._slots: asyncio.Semaphore | None = None
        self._session: aiohttp.ClientSession | None = None
        self._cache: OrderedDict[bytes, tuple[list[float], str]] = OrderedDict()
        self._cache_size = cache_size

    async def __call__(self, trajectory: Trajectory) -> dict[str, float | str | None]:
        """Returns the reward in [0, 1], the `score` itself, and the LLM judge's answer as `extracted`.

        Waits for a free slot and for the endpoint; on cancellation the request is abandoned.
        """
        if self._criteria is not None:
            return await self._score_criteria(trajectory, self._criteria)
        question = self._fill_rubric(trajectory)
        if trajectory.completion and not trajectory.answer:
            return {"reward": 0.0, "score": self._low, "extracted": None}
        (score,), answer = await self._scores_of(question, trajectory)
        return {"reward": self._scaled(score), "score": score, "extracted": answer}

    async def _score_criteria(self, trajectory: Trajectory, column: str) -> dict[str, float | str | None]:
        weights, texts = _criteria_of(trajectory, column)
        names = list(weights)
        if trajectory.completion and not trajectory.answer:
            return {"reward": 0.0, **dict.fromkeys(names, 0.0), "extracted": None}
        if "criteria" in self._names:
            listed = "\n".join(f"- {name}: {text}" for name, text in texts.items())
            scores, answer = await self._scores_of(self._fill_rubric(trajectory, criteria=listed), trajectory, names)
        else:
            questions = [self._fill_rubric(trajectory, criterion=f"{name}: {text}") for name, text in texts.items()]
            deadline = functools.cache(self._deadline)  # one for all requests
            try:
                async with asyncio.TaskGroup() as group:  # the first error cancels the others
                    ask = functools.partial(self._scores_of, trajectory=trajectory, deadline=deadline)
                    asking = [group.create_task(ask(question)) for question in questions]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            scores, answer = [task.result()[0][0] for task in asking], "\n".join(task.result()[1] for task in asking)
        metrics = dict(zip(names, map(self._scaled, scores), strict=True))
        reward = sum(weights[name] * metrics[name] for name in names) / sum(weights.values())
        return {"reward": reward, **metrics, "extracted": answer}

    def _scaled(self, score: float) -> float:
        return (score - self._low) / (self._high - self._low)

    async def _scores_of(
        self,
        question: str,
        trajectory: Trajectory,
        names: Sequence[str] = (),
        deadline: Callable[[], float] | None = None,
    ) -> tuple[list[float], str]:
        """Returns the score of each criterion in `names` (a single score if there are none), and the answer.

        `deadline` is called when the request has a slot; None gives the request its own deadline.
        """
        key = hashlib.sha256(question.encode(errors="surrogatepass")).digest()
        if key not in self._cache:
            if self._slots is None:
                self._slots = asyncio.Semaphore(self._max_concurrent)
            async with self._slots:
                answer = await self._ask(question, trajectory, (deadline or self._deadline)())
                if names:
                    scores = [self._read_criterion(name, answer, trajectory) for name in names]
                else:
                    scores = [self._read_score(answer, trajectory)[0]]
                self._cache[key] = scores, answer
        self._cache.move_to_end(key)
        found = self._cache[key]
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return found

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _fill_rubric(self, trajectory: Trajectory, **criteria: str) -> str:
        prompt = trajectory.prompt
        values = {name: chat_as_text(prompt.fields[name]) for name in self._names if name in prompt.fields}
        values |= {"completion": trajectory.answer, "thinking": trajectory.thinking}
        values |= {"prompt": prompt.text() if prompt.messages else "", **criteria}
        try:
            return _Formatter().format(self._rubric, **values)
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(
                f"The rubric uses {error}, but the prompt only has {sorted({*values, *prompt.fields})}. Change the "
                "rubric, or write {{ and }} for literal braces."
            ) from error

    def _deadline(self) -> float:
        return time.monotonic() + self._deadline_s

    async def _ask(self, question: str, trajectory: Trajectory, deadline: float) -> str:
        wait_s, attempt, failure = self._first_wait_s, 0, "no answer"
        while (left_s := deadline - time.monotonic()) > 0:
            attempt += 1
            try:
                status, text, retry_s = await asyncio.wait_for(self._post(question), left_s)
            except TimeoutError:
                break
            except OSError as error:  # aiohttp's connection errors are OSErrors
                status, text, retry_s = 0, repr(error), 0.0
            if status == 200:
                return text
            failure = f"status {status}: {text[:_MAX_SHOWN]}" if status else text
            if 400 <= status < 500 and status not in BUSY:
                raise RewardError(
                    f"The LLM judge at {self._url} answered {label(trajectory)} with {failure}. Check url, model, key "
                    "and rubric. If it refuses an argument, set max_tokens=None or temperature=None, and pass other "
                    "arguments in request."
                )
            pause_s = max(retry_s, wait_s * random.uniform(0.8, 1.2))
            await asyncio.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
            wait_s = min(2 * wait_s, _MAX_WAIT_S)
        raise RewardError(
            f"The LLM judge at {self._url} did not answer {label(trajectory)} within deadline_s={self._deadline_s:g} "
            f"in {count_text(attempt, 'attempt')} ({failure}). Check its server, or increase deadline_s and the "
            "reward's timeout.",
            reason="timeout",
        )

    async def _post(self, question: str) -> tuple[int, str, float]:
        """Returns the status, the answer's text (or the server's error), and how long the server asks to wait."""
        import aiohttp

        if self._session is None:
            key = os.environ.get(self._api_key_variable)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None))
        body = {**self._request, "messages": [*self._messages, {"role": "user", "content": question}]}
        try:
            async with self._session.post(self._url, json=body) as response:
                content = await body_of(response, _MAX_ANSWER_BYTES)
                if response.status != 200:
                    text = (content or b"").decode(errors="replace")
                    return response.status, text, retry_after_s(response.headers)
                answer = json.loads(content or b"")
        except aiohttp.ClientError as error:
            raise OSError(repr(error)) from error
        except (ValueError, RecursionError) as error:
            size = f"has more than {_MAX_ANSWER_BYTES >> 20} MiB" if content is None else f"is not JSON: {error}"
            raise RewardError(f"The answer from the LLM judge at {self._url} {size}. Check the url.") from error
        try:
            return 200, answer["choices"][0]["message"]["content"] or "", 0.0
        except (KeyError, IndexError, TypeError) as error:
            raise RewardError(
                f"The answer from the LLM judge at {self._url} has no message in its choices: {answer!r:.280}. "
                "Check the url."
            ) from error

    def _read_criterion(self, name: str, answer: str, trajectory: Trajectory) -> float:
        """Reads a criterion's last line or table row: the score is the pattern's match or the number after the name."""
        start = rf"(?im)^[^\w\n]*(?:\d+[.)][^\w\n]*)?{re.escape(name)}[^\w\n]*?[:=|]"
        found = deque(re.finditer(f"{start}(.*)$", split_thinking(answer)[1]), maxlen=1)
        if not found:
            raise RewardError(
                f"The LLM judge's answer for {label(trajectory)} has no line `{name}: score`: "
                f"{answer[-_MAX_SHOWN:]!r}. In the rubric, ask for a line per criterion, or increase max_tokens."
            )
        if self._pattern.pattern != _SCORE:
            return self._read_score(found[0][0], trajectory)[0]
        return self._read_score(f"score: {found[0][1]}", trajectory, _SCORE_AT_START)[0]

    def _read_score(
        self, answer: str, trajectory: Trajectory, pattern: re.Pattern[str] | None = None
    ) -> tuple[float, str]:
        pattern = pattern or self._pattern
        text = split_thinking(answer)[1]
        match = next(iter(deque(pattern.finditer(text), maxlen=1)), None)
        if match is None or _OR_ANOTHER.match(text, match.end()):
            raise RewardError(
                f"The LLM judge's answer for {label(trajectory)} has no unambiguous score that matches "
                f"{pattern.pattern!r}: {answer[-_MAX_SHOWN:]!r}. Ask for this format in the rubric, change "
                "score_pattern, or increase max_tokens."
            )
        score = float(match[1].replace("−", "-"))
        best = re.match(r"\W{0,5}(?:/|out of)\s*(\d+)", text[match.end(1) :])
        if not self._low <= score <= self._high or (best is not None and float(best[1]) != self._high):
            raise RewardError(
                f"The LLM judge gave {label(trajectory)} the score {match[1]}{best[0] if best else ''}, outside "
                f"score_range={[self._low, self._high]}. State the range in the rubric, or change score_range."
            )
        return score, answer


def _criteria_of(trajectory: Trajectory, column: str) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the weights and the descriptions, by name, of the criteria in a column of the prompt."""
    rows: Any = trajectory.prompt.fields.get(column)
    weights, texts = {}, {}
    try:
        rows = [{key: value for key, value in row.items() if value is not None} for row in rows]  # Parquet adds None
        weights = {str(row["name"]): float(row.get("weight", 1)) for row in rows}
        texts = {str(row["name"]): str(row.get("description", "")) for row in rows}
        are_names_valid = len(weights) == len(rows) and not {"reward", "rewards", "extracted"} & weights.keys()
        is_valid = bool(weights) and are_names_valid and all(0 < weight < 1e9 for weight in weights.values())
    except (AttributeError, KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise RewardError(
            f"criteria={column!r} must be a column with a list of {{name, description, weight}}, with different names "
            f"and weights above 0, but {label(trajectory)} has {rows!r:.200}.",
            reason="invalid",
        )
    return weights, texts


class _Formatter(string.Formatter):
    """Fills in plain names only, so that a rubric cannot access attributes."""

    def get_field(self, field_name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, str]:
        return self.get_value(field_name, args, kwargs), field_name
