"""Starts Flower with safe settings and with limits on its memory (`python -m toolcrew.orchestrator.operations.flower`).

Flower gets the address of Redis from toolcrew's settings, also with TLS and sentinels.

Variables FLOWER_* override DEFAULTS. Flower is always read-only, and does not start without a password.
"""

import atexit
import gc
import logging
import signal
import sys
from importlib import resources
from typing import Any

import tornado.options
import tornado.web
from flower.api.tasks import GetQueueLengths
from flower.app import Flower
from flower.command import apply_env_options, apply_options, extract_settings
from flower.options import options
from flower.urls import settings as flower_settings
from flower.views import BaseHandler
from flower.views.broker import BrokerView
from flower.views.monitor import Metrics
from flower.views.tasks import TasksView, TaskView

from toolcrew.contract.errors import ConfigError, ToolcrewError
from toolcrew.contract.names import call_page_url, parse_shown_call
from toolcrew.contract.settings import OrchestratorSettings, load_settings
from toolcrew.orchestrator.logs import configure_logging
from toolcrew.orchestrator.operations.pool_commands import open_command_app

DEFAULTS: dict[str, Any] = {
    # Limit of the tasks in memory. Each task takes about 5 KiB.
    "max_tasks": 20_000,
    "max_workers": 1_000,
    "purge_offline_workers": 300,
    "task_runtime_metric_buckets": [0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0],
    "tasks_columns": "name,state,runtime,received,kwargs,worker,uuid",
    # Interval in milliseconds. Flower is blocked while it saves its state, and the loss of one minute of the state is
    # acceptable.
    "state_save_interval": 60_000,
}
TEMPLATE = resources.files("toolcrew.orchestrator.operations").joinpath("flower_call.html")
TASKS_TEMPLATE = resources.files("toolcrew.orchestrator.operations").joinpath("flower_tasks.html")


class CallTaskView(TaskView):  # type: ignore[misc]
    """Flower's page of a task that also shows the call, with a link to the call's page in the API. `page_url`:
    TOOLCREW_PAGE_URL.
    """

    def initialize(self, page_url: str | None) -> None:
        self._page_url = page_url

    def render(self, template_name: str, **values: Any) -> None:
        if template_name != "task.html":
            super().render(template_name, **values)
            return
        call_id = parse_shown_call(values["task"].kwargs)
        call_url = call_page_url(self._page_url, call_id) if self._page_url and call_id else None
        super().render(str(TEMPLATE), call_id=call_id, call_url=call_url, **values)


class TaskList(TasksView):  # type: ignore[misc]
    """Flower's list of tasks, with columns that fit into the window."""

    def render(self, template_name: str, **values: Any) -> None:
        super().render(str(TASKS_TEMPLATE) if template_name == "tasks.html" else template_name, **values)


class LiveQueues(BaseHandler):  # type: ignore[misc]
    """Lists the queues of workers that are online. Flower's own list keeps the queues of dead workers until Flower
    restarts.
    """

    def get_active_queue_names(self) -> list[str]:
        workers, online = self.application.workers, self.application.events.state.workers
        queues = {
            queue["name"]
            for name, worker in online.items()
            if worker.alive
            for queue in workers.get(name, {}).get("active_queues", [])
        }
        return sorted(queues)


class LiveBroker(LiveQueues, BrokerView):  # type: ignore[misc]
    """Flower's page "Broker", with the queues of live workers only."""

    @tornado.web.authenticated
    async def get(self) -> None:
        # Flower asks for queues only on other pages.
        await self.application.update_workers()
        await super().get()


class LiveQueueLengths(LiveQueues, GetQueueLengths):  # type: ignore[misc]
    """Flower's endpoint for the lengths of queues, with the queues of live workers only."""

    @tornado.web.authenticated
    async def get(self) -> None:
        # Flower asks for queues only on other pages.
        await self.application.update_workers()
        await super().get()


class GuardedMetrics(Metrics):  # type: ignore[misc]
    """Flower's metrics, behind the login. Flower's own handler shows names of tools and hosts, and the load, without a
    login.
    """

    @tornado.web.authenticated
    async def get(self) -> None:
        await super().get()


def main() -> int:
    gc.freeze()  # the modules live as long as the process: never search them for garbage (contract/startup.py)
    try:
        settings = load_settings()
        app = _open_flower(settings, sys.argv[1:])
    except ToolcrewError as error:
        sys.stderr.write(f"flower: {error}\n")
        return 1
    # Flower saves its state when it ends.
    atexit.register(app.stop)
    signal.signal(signal.SIGTERM, _end)
    app.start_http_server()
    try:
        app.start()
    except (KeyboardInterrupt, SystemExit):
        return 0
    return 0


def _open_flower(settings: OrchestratorSettings, arguments: list[str]) -> Flower:
    """Create Flower. Raises ConfigError when it has no password, or an option is invalid."""
    for name, value in DEFAULTS.items():
        setattr(options, name, value)
    try:
        apply_env_options()
        apply_options(sys.argv[0], arguments)
    except (tornado.options.Error, ValueError, OSError) as error:
        raise ConfigError(f"a FLOWER_ variable or an argument is invalid ({error}): correct it") from error
    options.read_only = True
    if not options.basic_auth and not options.auth:
        raise ConfigError("Flower has no password and would be public: set FLOWER_BASIC_AUTH=user:password")
    extract_settings()
    # Tornado configured its own logs when it read the options.
    configure_logging(settings, "flower")
    logging.getLogger("flower").setLevel(settings.log_level)
    app = Flower(capp=open_command_app(settings.broker(), "toolcrew-flower"), options=options, **flower_settings)
    ours = [
        (_path(r"/task/(.+)"), CallTaskView, {"page_url": settings.page_url}),
        (_path(r"/tasks"), TaskList),
        (_path(r"/metrics"), GuardedMetrics),
        (_path(r"/broker"), LiveBroker),
        (_path(r"/api/queues/length"), LiveQueueLengths),
    ]
    app.add_handlers(".*", ours)
    return app


def _path(pattern: str) -> str:
    return f"/{options.url_prefix.strip('/')}{pattern}" if options.url_prefix else pattern


def _end(number: int, _: object) -> None:
    logging.getLogger("flower").info("ends by %s", signal.Signals(number).name)
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
