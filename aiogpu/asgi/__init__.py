"""Every request of an ASGI application (FastAPI, Starlette, Litestar, Quart, ...) on a stream of its own.

    @api.post("/classify")
    async def classify(...): ...

    app = aiogpu.asgi.StreamMiddleware(api)     # or api.add_middleware(aiogpu.asgi.StreamMiddleware)

Import it by name: ``import aiogpu.asgi``. From the front door down:

    middleware     a task around every request; what its errors and its end mean to the client
    lifespan       opens and drains the runtime, for applications with and without a lifespan
    exchange       one request and its response, watched for the client's disconnect
    gate           who is let in: started, draining, in flight
    answers        which error is which status
"""

from .middleware import StreamMiddleware

__all__ = ["StreamMiddleware"]
