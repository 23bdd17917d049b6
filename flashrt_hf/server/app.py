"""The HTTP application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import flash_rt

from . import chat, completions, embeddings, openapi, page
from .config import ServerConfig
from .errors import ApiError, bad
from .exchange import Exchange, Gone, TextExchange
from .gate import Bodies, Gate
from .images import Images
from .metrics import Metrics
from .schema.base import SamplingRequest, read
from .schema.chat import ChatRequest
from .schema.completions import CompletionRequest
from .schema.embeddings import EmbeddingRequest
from .served import Served
from .sse import EventStream
from .wire import Head
from .work import CallWork, Result, TextWork
from .worker import Worker, closed

T = TypeVar("T")
BODIES: list[type[BaseModel]] = [ChatRequest, CompletionRequest, EmbeddingRequest]
SMALL_BODY_BYTES = 4096  # made ready for the model in less time than a thread takes to begin
PREPARING_THREADS = 2  # a long text takes hundreds of bytes a token while it is tokenised
FAILURES = openapi.errors(400, 401, 404, 408, 413, 415, 429, 503, 504)


class Server:
    """Endpoints of one model; ``app`` is the ASGI application.

    Attributes:
        worker: drives the model; started and ended by the application's lifespan.
        bodies: of requests that are not whole yet.
    """

    def __init__(self, model: Served, config: ServerConfig) -> None:
        self.model, self.config = model, config
        self.metrics, self.bodies = Metrics(), Bodies(config.body_timeout_s)
        self.worker = Worker(
            model.engine, max_queue=config.max_queue, metrics=self.metrics, device=model.device
        )
        self._images = Images(config)
        self._preparing = ThreadPoolExecutor(PREPARING_THREADS, "flash-rt prepare")
        self.metrics.gauge("queue_depth", "Requests that wait", lambda: self.worker.waiting)
        self.metrics.gauge("running", "Requests that have a slot", lambda: self.worker.running)
        counters = model.counters if model.engine is None else model.engine.counters
        if counters is not None:
            self.metrics.totals(counters)
        self.app = self._make_app()

    def _make_app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            self.worker.start(asyncio.get_running_loop())
            yield
            await self.worker.drain(0.0)
            self._preparing.shutdown(wait=False, cancel_futures=True)

        app = FastAPI(
            title="FlashRT",
            version=flash_rt.__version__,
            description="One model, in OpenAI's wire format.",
            lifespan=lifespan,
            docs_url=None,
            redoc_url=None,
        )
        self._add_routes(app)
        openapi.install(app, BODIES)
        handlers: list[tuple[type[Exception], Any]] = [
            (ApiError, _api_error),
            (Gone, _gone),
            (ClientDisconnect, _gone),  # before its body was whole
            (HTTPException, _http_error),
            (Exception, _unexpected),
        ]
        for kind, handler in handlers:
            app.add_exception_handler(kind, handler)
        paths = frozenset(route.path for route in app.routes if hasattr(route, "path"))
        app.add_middleware(
            Gate, config=self.config, metrics=self.metrics, paths=paths, bodies=self.bodies
        )
        return app

    def _add_routes(self, app: FastAPI) -> None:
        get, post = app.get, app.post
        get("/", include_in_schema=False)(page.index)
        get("/health", summary="Whether the process works")(self.health)
        get("/ready", summary="Whether requests are taken", responses=openapi.errors(503))(
            self.ready
        )
        get("/metrics", summary="Prometheus metrics", responses=openapi.errors(401))(
            self.prometheus
        )
        get("/v1/models", responses=openapi.errors(401))(self.models)
        get("/v1/models/{name:path}", responses=openapi.errors(401, 404))(self.one_model)
        get("/v1/plan", responses=openapi.errors(401))(self.plan)
        for path, kind, endpoint in (
            ("/v1/chat/completions", ChatRequest, self.chat),
            ("/v1/completions", CompletionRequest, self.completions),
            ("/v1/embeddings", EmbeddingRequest, self.embeddings),
        ):
            post(path, responses=FAILURES, openapi_extra=openapi.body(kind))(endpoint)

    async def health(self) -> Response:
        """200 while the process can work, also while it shuts down."""
        state = self.worker.state
        return JSONResponse({"status": state}, 503 if state == "broken" else 200)

    async def ready(self) -> Response:
        """200 while requests are taken."""
        state = self.worker.state
        return JSONResponse({"status": state}, 200 if state == "open" else 503)

    async def prometheus(self) -> Response:
        """Text format, version 0.0.4."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [self._card()]}

    async def one_model(self, name: str) -> dict[str, Any]:
        """The model, by its name."""
        self._check_name(name)
        return self._card()

    def _card(self) -> dict[str, Any]:
        model = self.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "flashrt",
            "max_model_len": model.max_len,
            "abilities": model.abilities,
        }

    async def plan(self) -> dict[str, Any]:
        """What runs where, and why: the table of ``structures.explain``."""
        return await asyncio.to_thread(self.model.plan)

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions."""
        body, arrived = await self._read(ChatRequest, request)
        model = self.model
        if "chat" not in model.abilities:
            raise bad("The model does not chat", "model", "unsupported_endpoint")
        quick = chat.quick(body) and await _is_small(request)
        given = (body, model, self.config, self._images)
        if chat.has_images(body):  # they may be on their way for long, and hold up no text
            plan = await asyncio.to_thread(chat.prepare, *given)
        else:
            plan = await self._prepare(chat.prepare, *given, here=quick)
        work = self._text_work(plan.request, plan.inputs, body, request, arrived, asyncio.Queue())
        exchange = TextExchange(self.worker, [work], plan.answers, request, self.metrics)
        head = Head("chat.completion", "chat.completion.chunk", model.name, "chatcmpl")
        return await self._answer(exchange, body, head, chat)

    async def completions(self, request: Request) -> Response:
        """OpenAI's text completions."""
        body, arrived = await self._read(CompletionRequest, request)
        model = self.model
        if model.engine is None:
            raise bad("The model writes no text", "model", "unsupported_endpoint")
        quick = await _is_small(request)
        parts = await self._prepare(completions.prepare, body, model, self.config, here=quick)
        events: asyncio.Queue[Any] = asyncio.Queue()
        works = [self._text_work(r, None, body, request, arrived, events) for r, _ in parts]
        answers = [answer for _, several in parts for answer in several]
        exchange = TextExchange(self.worker, works, answers, request, self.metrics)
        head = Head("text_completion", "text_completion", model.name, "cmpl")
        return await self._answer(exchange, body, head, completions)

    async def _prepare(self, function: Callable[..., T], *args: Any, here: bool) -> T:
        """``function(*args)``: ``here``, or in another thread while other requests go on."""
        if here:
            return function(*args)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._preparing, function, *args)

    async def _answer(
        self, exchange: TextExchange, body: SamplingRequest, head: Head, form: Any
    ) -> Response:
        codec = self.model.codec
        if body.stream:
            return await EventStream.begin(exchange, form.chunks(exchange, body, codec, head))
        exchange.open()
        try:
            return JSONResponse(await form.whole(exchange, body, codec, head))
        finally:
            exchange.close()

    async def embeddings(self, request: Request) -> Response:
        """OpenAI's embeddings."""
        body, arrived = await self._read(EmbeddingRequest, request)
        embedder = embeddings.check(self.model.embedder)
        quick = await _is_small(request)
        ids = await self._prepare(embedder.encode, body.inputs, here=quick)
        work = CallWork(
            client=self._client(request, body.user),
            deadline=arrived + self.config.request_timeout_s,
            arrived=arrived,
            events=asyncio.Queue(),
            function=lambda: embedder.embed(ids),
        )
        exchange = Exchange(self.worker, [work], request)
        exchange.open()
        try:
            _, result = await exchange.event()
        finally:
            exchange.close()
        assert isinstance(result, Result)
        tokens = sum(map(len, ids))
        self.metrics.prompt_tokens.inc(tokens)
        return JSONResponse(embeddings.answer(body, self.model.name, result.value, tokens))

    async def _read(self, kind: type[T], request: Request) -> tuple[T, float]:
        arrived = time.monotonic()
        if self.worker.state != "open":
            raise closed(self.worker.state)
        body: Any = read(kind, await request.body())  # type: ignore[type-var]
        self._check_name(body.model)
        if getattr(body, "stream_options", None) is not None and not body.stream:
            raise bad("'stream_options' needs 'stream': true", "stream_options")
        return body, arrived

    def _check_name(self, name: str) -> None:
        if name != self.model.name:
            raise ApiError(
                404,
                f"The model {name[:200]!r} does not exist; this server has {self.model.name!r}",
                param="model",
                code="model_not_found",
            )

    def _client(self, request: Request, user: str | None) -> Hashable:
        return (request.state.client, user)

    def _text_work(
        self,
        wanted: Any,
        inputs: Any,
        body: SamplingRequest,
        request: Request,
        arrived: float,
        events: asyncio.Queue[Any],
    ) -> TextWork:
        return TextWork(
            client=self._client(request, body.user),
            deadline=arrived + self.config.request_timeout_s,
            arrived=arrived,
            events=events,
            request=wanted,
            inputs=inputs,
        )


async def _is_small(request: Request) -> bool:
    return len(await request.body()) <= SMALL_BODY_BYTES


Handler = Callable[[Request, Any], Any]


async def _api_error(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _http_error(request: Request, error: HTTPException) -> Response:
    found = ApiError(error.status_code, str(error.detail))
    return JSONResponse(found.body(), error.status_code, error.headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    found = ApiError(500, "The server failed on this request; its log says why")
    return JSONResponse(found.body(), 500)
