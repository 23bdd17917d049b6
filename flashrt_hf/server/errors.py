"""Errors in the form that OpenAI clients read."""

from __future__ import annotations

from typing import Any

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    406: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status.
        message: rule and value, for people.
        param: the parameter at fault, dotted; None where no single one is.
        code: for programs.
        headers: sent with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """``{"error": {...}}``."""
        kind = KINDS.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def bad(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A parameter with a value that cannot be served."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, why: str = "") -> ApiError:
    """A parameter that this server or this model does not have."""
    text = f"Unsupported parameter: {param!r}" + (f": {why}" if why else "")
    return ApiError(400, text, param=param, code="unsupported_parameter")
