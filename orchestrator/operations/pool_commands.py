"""The Celery application for programs that look at the pool: Flower and Celery's own commands. It sends no call."""

from celery import Celery

from toolcrew.contract.broker import BrokerSettings


def open_command_app(broker: BrokerSettings, name: str) -> Celery:
    """Return an application that reads events, and asks workers with Celery's `inspect`."""
    celery_options = broker.celery_options()
    # Without a result backend: these programs do not need the results of calls, and their Redis user may not read them.
    del celery_options["result_backend"]
    app = Celery(name, set_as_current=False)
    # Other keys for unacknowledged messages than the workers, whose keys contain calls.
    own = {f"unacked_{kind}key": f"flower.unacked.{kind}" for kind in ("", "index_", "mutex_")}
    broker_options = {**celery_options.pop("broker_transport_options"), **own, "priority_steps": [0]}
    app.conf.update(**celery_options, broker_transport_options=broker_options, accept_content=["json"])
    return app
