"""Random requests drawn from the OpenAPI document: whatever comes, the server answers below 500."""

from __future__ import annotations

import json
from collections import Counter

import httpx
import pytest
from fake_engine import FakeEngine
from serving_support import fake, run_server

schemathesis = pytest.importorskip("schemathesis", reason="random requests need schemathesis")
hypothesis = pytest.importorskip("hypothesis")

EXAMPLES = 20
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
    "/v1/models/{name}",
    "/v1/plan",
    "/health",
    "/ready",
    "/metrics",
)
BODIES = ENDPOINTS[:3]


@pytest.fixture(scope="module")
def quick():
    """Short answers, so that most of the time goes into requests."""
    with run_server(fake(FakeEngine(slots=8, max_len=400))) as running:
        yield running


@pytest.fixture(scope="module")
def document(quick):
    return httpx.get(f"{quick.url}/openapi.json").json()


def test_every_endpoint_is_described(document):
    assert set(document["paths"]) == set(ENDPOINTS)
    assert document["openapi"].startswith("3.")
    text = json.dumps(document)
    assert "HTTPValidationError" not in text
    schemas = document["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest", "EmbeddingRequest"):
        assert schemas[name]["additionalProperties"] is False
    used = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert used <= set(schemas)


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_request_fails_the_server(quick, document, path, mode):
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=quick.url)
    (operation,) = (found.ok() for found in schema.get_all_operations() if found.ok().path == path)
    seen = Counter()

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(schemathesis.GenerationMode[mode]))
    def run(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "tiny"  # to get past the check of the name
        answer = case.call(timeout=30)
        seen[answer.status_code] += 1
        assert answer.status_code < 500, (answer.status_code, answer.content, case.body)
        if answer.status_code >= 400:
            assert set(answer.json()) == {"error"}

    if mode == "NEGATIVE" and path not in BODIES:
        with pytest.raises(hypothesis.errors.Unsatisfiable):  # there is nothing to get wrong
            run()
        return
    run()
    if mode == "NEGATIVE" and path in BODIES:
        assert seen[400] > seen[200]
    if mode == "POSITIVE" and path == "/v1/completions":
        assert seen[200] > 0
    assert quick.server.worker.state == "open"
