"""A stand-in for an LLM judge, for a dry run: its score is the number of digits in the answer.

python -m examples.judge.fake_judge 8123
"""

import sys

from aiohttp import web


async def answer(request: web.Request) -> web.Response:
    completion = (await request.json())["messages"][-1]["content"].rpartition("Answer:")[2]
    score = min(10, sum(char.isdigit() for char in completion))
    return web.json_response({"choices": [{"message": {"content": f"Well.\nScore: {score}"}}]})


if __name__ == "__main__":
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]))
