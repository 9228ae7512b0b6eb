"""How a service process begins and ends: settings, logs, metrics, a stop event on SIGTERM and SIGINT, one line on a bad setting.

`run(name, main)` is the whole entry point: `main(settings, stop)` runs until `stop` is set and then returns within its own bound.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import structlog

from .quiet import Repeats
from .settings import Settings, SettingsError, load_settings
from .tracing import start_tracing

__all__ = ["configure_logging", "run"]

_STOP_TIMEOUT_S = 20.0  # after SIGTERM; supervisors kill at 30


def configure_logging(settings: Settings, service: str) -> None:
    """Events with fields on standard error, JSON unless `log_format` is text; the libraries' own logs join in at WARNING."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    tail: list[structlog.types.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if settings.log_format == "json"
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)]
    )
    level = getattr(logging, settings.log_level)
    structlog.configure(
        processors=[*shared, *tail],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *tail],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(Repeats())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
    structlog.contextvars.bind_contextvars(service=service, pid=os.getpid())


def run(service: str, main: Callable[[Settings, asyncio.Event], Awaitable[None]]) -> None:
    """Run a service until it is told to stop. Exit status: 0 after a stop, 1 on a failure, 2 on a bad setting."""
    try:
        settings = load_settings()
    except SettingsError as error:
        print(f"{service}: {error}", file=sys.stderr)  # noqa: T201
        raise SystemExit(2) from None
    configure_logging(settings, service)
    start_tracing(settings, service)
    log = structlog.get_logger()
    try:
        asyncio.run(_until_stopped(settings, main))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except SettingsError as error:  # a setting that only the service itself could judge, such as a secret others can read
        log.error("bad setting", error=str(error))
        raise SystemExit(2) from None
    except Exception:
        log.exception("service failed")
        raise SystemExit(1) from None
    log.info("service stopped")


async def _until_stopped(settings: Settings, main: Callable[[Settings, asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    task = asyncio.ensure_future(main(settings, stop))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        done, _ = await asyncio.wait({task}, timeout=_STOP_TIMEOUT_S)
        if not done:
            task.cancel()
            raise TimeoutError(f"did not stop within {_STOP_TIMEOUT_S:.0f} s of SIGTERM")
    await task
