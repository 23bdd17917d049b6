"""The OpenAPI document: bodies are read by hand, so their schemas are added by hand."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

REF = "#/components/schemas/{model}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
REASONS = {
    400: "a parameter is missing, wrong or not supported",
    401: "no or a wrong API key",
    404: "no such model",
    408: "the body came too slowly",
    413: "the body is too large",
    415: "the body is not declared as JSON",
    429: "the queue is full; Retry-After says when to come back",
    503: "the server is starting, shutting down or broken",
    504: "the request ran out of time",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """``responses=`` of an endpoint."""
    content = {"application/json": {"schema": {"$ref": REF.format(model="Error")}}}
    return {s: {"description": REASONS[s], "content": content} for s in statuses}


def body(kind: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra=`` of an endpoint that reads ``kind``."""
    schema = {"$ref": REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI, kinds: list[type[BaseModel]]) -> None:
    """Make ``app.openapi()`` describe the bodies too."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title, version=app.version, routes=app.routes, description=app.description
            )
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            schemas["Error"] = ERROR
            for kind in kinds:
                schema = kind.model_json_schema(ref_template=REF)
                schemas.update(schema.pop("$defs", {}))
                schemas[kind.__name__] = schema
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            for path in made["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
