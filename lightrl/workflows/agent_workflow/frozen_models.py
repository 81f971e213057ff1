"""FrozenModel: another model that agents use next to the policy. Its answers are neither recorded nor trained on."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from lightrl.workflows.agent_workflow.protocol import RequestRefused

log = logging.getLogger(__name__)

_CONNECT_S = 30.0
_TOTAL_S = 3600.0
_PASSED = ("Content-Type", "anthropic-version", "anthropic-beta")  # headers forwarded in both directions
_CHUNK = 1 << 16


@dataclass(frozen=True)
class FrozenModel:
    """A model on another server, for example a judge, a helper or a simulated user.

    Args:
        url: base URL of the server's API, including `/v1`.
        model: the server's name for the model; None sends the name that the agent used.
        api_key_variable: the environment variable with the server's key, which agents do not see; None sends no key.
    """

    url: str
    model: str | None = None
    api_key_variable: str | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"The url of a frozen model must start with http:// or https://, got {self.url!r}.")
        if self.api_key_variable is not None and not os.environ.get(self.api_key_variable):
            raise ValueError(f"models has api_key_variable={self.api_key_variable!r}, which is not set. Export it.")


async def forward(request: web.Request, body: bytes, path: str, model: FrozenModel) -> web.StreamResponse:
    """Forwards a request to a frozen model and streams the answer; raises RequestRefused if it is unreachable."""
    fields = json.loads(body)  # encoded again, since the server might read a repeated key differently than we do
    body = json.dumps({**fields, "model": model.model or fields["model"]}).encode()
    headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
    if key := os.environ.get(model.api_key_variable or ""):
        headers |= {"Authorization": f"Bearer {key}", "x-api-key": key}
    timeout = aiohttp.ClientTimeout(total=_TOTAL_S, sock_connect=_CONNECT_S)
    response: web.StreamResponse | None = None
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{model.url.rstrip('/')}/{path}", data=body, headers=headers) as answer,
        ):
            passed = {name: answer.headers[name] for name in _PASSED if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=passed)
            await response.prepare(request)
            async for chunk in answer.content.iter_chunked(_CHUNK):
                await response.write(chunk)
            await response.write_eof()
    except (aiohttp.ClientError, OSError) as error:
        if response is not None:  # the answer has started; closing the connection shows that it is incomplete
            raise
        log.warning("The frozen model at %s does not answer: %s", model.url, str(error) or type(error).__name__)
        text = f"The frozen model {fields['model']!r:.80} does not answer. The run's log has the reason."
        raise RequestRefused(text, status=502, code="model_unreachable") from error
    return response
