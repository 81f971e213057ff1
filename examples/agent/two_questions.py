"""An agent written with the openai client: it asks for the largest of four digits, then for the smallest."""

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from lightrl import Prompt

# All trajectories share one client and its connections. The endpoint is plain HTTP, so the client needs no TLS context.
CLIENT = AsyncOpenAI(api_key="set by run", http_client=DefaultAsyncHttpxClient(verify=False))


async def run(prompt: Prompt, base_url: str, api_key: str) -> float:
    """Returns half a point for each right answer; for a prompt `3719=` the questions are `3719=`, then `=`."""
    policy = CLIENT.with_options(base_url=base_url, api_key=api_key)
    digits, messages, reward = prompt.id[:4], [], 0.0
    for question, expected in ((f"{digits}=", max(digits)), ("=", min(digits))):
        messages.append({"role": "user", "content": question})
        answer = await policy.chat.completions.create(model="policy", messages=messages)
        messages.append(answer.choices[0].message)
        reward += 0.5 * (messages[-1].content == expected)
    return reward
