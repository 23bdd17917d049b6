"""Stream a chat, then get JSON that follows a schema, from a server of `flash-rt serve`.

    python examples/serve_client.py [ADDRESS]          # default http://127.0.0.1:8000

Needs `pip install openai`; FLASH_RT_API_KEY holds the server's key, where it has one.
"""

from __future__ import annotations

import os
import sys
import time

from openai import OpenAI

address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{address}/v1", api_key=os.environ.get("FLASH_RT_API_KEY", "none"))
model = client.models.list().data[0].id

start, first, tokens = time.perf_counter(), 0.0, 0
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Why is the sky blue?"}],
    max_tokens=64,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        first = first or time.perf_counter()
        print(chunk.choices[0].delta.content, end="", flush=True)
    if chunk.usage:
        tokens = chunk.usage.completion_tokens
rate = (tokens - 1) / max(time.perf_counter() - first, 1e-9)
print(f"\n{tokens} tokens, first after {1e3 * (first - start):.0f} ms, then {rate:.0f} tok/s")

schema = {
    "type": "object",
    "properties": {"colour": {"enum": ["blue", "red"]}, "certain": {"type": "boolean"}},
    "required": ["colour", "certain"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What colour is the sky? Answer in JSON."}],
    response_format={"type": "json_schema", "json_schema": {"name": "sky", "schema": schema}},
    max_tokens=200,
)
print(answer.choices[0].message.content)
