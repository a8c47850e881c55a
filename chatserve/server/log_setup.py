"""Logging of the API process: structlog events and foreign log records in one stream on stderr.

Console or JSON lines. Nobody logs prompts, answers or keys; the request line carries an id, a status, counts and a
time. Called once, by `chatserve.server.run`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from chatserve.config import ServerConfig

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure_logging(config: ServerConfig) -> None:
    """Send everything from ``config.log_level`` on to stderr, in ``config.log_format``."""
    level = LEVELS[config.log_level]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[Any]
    if config.log_format == "json":
        renderer = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        colors = sys.stderr.isatty()
        renderer = [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    logging.getLogger("uvicorn.error").setLevel(max(level, logging.WARNING))
