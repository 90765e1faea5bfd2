"""`python -m orchestrator.flower`: Flower, told where Redis is by our own settings, so that TLS and sentinels hold for it, too."""

import sys

from celery import Celery

from contract.errors import ToolcrewError
from orchestrator.settings import load_settings


def main() -> int:
    try:
        where = load_settings().broker().celery_options()
    except ToolcrewError as error:
        sys.stderr.write(f"flower: {error}\n")
        return 1
    # Without results: what a call gave is none of its business, and its Redis user may not read them.
    del where["result_backend"]
    app = Celery("toolcrew-flower", set_as_current=False)
    # What it takes and has not acknowledged, apart from what workers have: those are calls.
    own = {f"unacked_{name}key": f"flower.unacked.{name}" for name in ("", "index_", "mutex_")}
    options = {**where.pop("broker_transport_options"), **own, "priority_steps": [0]}
    app.conf.update(**where, broker_transport_options=options, accept_content=["json"])
    return int(app.start(["flower", *sys.argv[1:]]) or 0)


if __name__ == "__main__":
    sys.exit(main())
