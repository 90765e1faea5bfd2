"""Answer every call of a queue immediately and store the results as Celery does: `python -m benchmarks.echo_pool URL
QUEUE`.
"""

import json
import sys

import redis

BATCH = 100
TTL_S = 3600


def main(url: str, queue: str) -> None:
    client = redis.Redis.from_url(url, socket_timeout=10)
    while True:
        found = client.brpop([queue], timeout=1)
        if found is None:
            continue
        items = [found[1], *(client.rpop(queue, BATCH) or [])]
        with client.pipeline(transaction=True) as pipe:
            for item in items:
                task_id = json.loads(item)["headers"]["id"]
                key = f"celery-task-meta-{task_id}"
                text = json.dumps(
                    {
                        "status": "SUCCESS",
                        "result": None,
                        "traceback": None,
                        "children": [],
                        "date_done": "",
                        "task_id": task_id,
                    }
                )
                pipe.set(key, text, ex=TTL_S)
                pipe.publish(key, text)
            pipe.execute()


if __name__ == "__main__":
    main(*sys.argv[1:])
