"""A program that answers the messages of MCP on its standard input as a server of the package does."""

import json
import sys
import time

PRICE = {
    "name": "price",
    "description": "Finds the price of an item.",
    "inputSchema": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
}
num_calls = 0
for line in sys.stdin:
    request = json.loads(line)
    params = request.get("params", {})
    answer = {}
    if "id" not in request:
        continue
    if request["method"] == "initialize":
        time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
        info = {"name": "shop", "version": "1"}
        answer["result"] = {"protocolVersion": params["protocolVersion"], "serverInfo": info}
        answer["result"]["capabilities"] = {"tools": {}}
    elif request["method"] == "tools/list":
        answer["result"] = {"tools": [PRICE]}
    elif request["method"] == "tools/call":
        num_calls += 1
        item = params["arguments"]["item"]
        if item == "end":
            break
        content = [{"type": "text", "text": f"3, call {num_calls}" if item == "tea" else f"no {item} here"}]
        if item == "tea":
            content.append({"type": "image", "data": "iVBORw0=", "mimeType": "image/png"})
        answer["result"] = {"content": content, "isError": item != "tea"}
        if item == "?":
            answer = {"error": {"code": -32602, "message": "an item is a word"}}
    else:
        answer["error"] = {"code": -32601, "message": "Method not found"}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}), flush=True)  # noqa: T201
