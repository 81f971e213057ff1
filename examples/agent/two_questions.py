"""An agent written with the openai client: it asks for the largest of four digits, then for the smallest."""

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from lightrl import Prompt


async def run(prompt: Prompt, base_url: str, api_key: str) -> float:
    """Half a point for each right answer; the questions for a prompt `3719=` are `3719=` and then `=`."""
    digits, messages, reward = prompt.id[:4], [], 0.0
    plain_http = DefaultAsyncHttpxClient(verify=False)  # a TLS context per trajectory costs 20 ms and is not used
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=plain_http) as client:
        for question, expected in ((f"{digits}=", max(digits)), ("=", min(digits))):
            messages.append({"role": "user", "content": question})
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages.append(answer.choices[0].message)
            reward += 0.5 * (messages[-1].content == expected)
    return reward
