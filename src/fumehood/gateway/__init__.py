"""The HTTP gateway: OpenAI's Responses, Containers, Files and Models APIs as an ASGI application.

It authenticates, limits, parses and logs requests, and streams responses; chat completions and embeddings are passed
through to model servers. What serves them is behind `fumehood.interfaces`.
"""

from fumehood.gateway.app import Gateway
from fumehood.gateway.authentication import AnonymousAuthenticator, ApiKeyAuthenticator, Authenticator
from fumehood.gateway.cors import ANY_ORIGIN, CorsPolicy
from fumehood.gateway.gateway_metrics import EventLoopLagMonitor, GatewayMetrics
from fumehood.gateway.gateway_web_server import GatewayWebServer
from fumehood.gateway.request_limiter import RequestLimiter
from fumehood.gateway.request_log import BufferedRequestLog, RequestLog, log_to_logger
from fumehood.gateway.routes.content_url_check import reject_every_url

__all__ = [
    "ANY_ORIGIN",
    "AnonymousAuthenticator",
    "ApiKeyAuthenticator",
    "Authenticator",
    "BufferedRequestLog",
    "CorsPolicy",
    "EventLoopLagMonitor",
    "Gateway",
    "GatewayMetrics",
    "GatewayWebServer",
    "RequestLimiter",
    "RequestLog",
    "log_to_logger",
    "reject_every_url",
]
