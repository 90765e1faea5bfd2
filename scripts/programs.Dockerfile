# An image with the compilers, runtimes and servers that scripts/programs runs, from the packages of Debian 12.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

RUN export DEBIAN_FRONTEND=noninteractive \
    && apt-get update \
    && apt-get install -y --no-install-recommends \
        bubblewrap build-essential ca-certificates cargo ccache chromium clang cmake curl default-jdk-headless \
        docker.io file gawk gdb git golang-go inotify-tools iproute2 iputils-ping jq less libclang-rt-dev linux-perf \
        lsof mono-mcs nginx-light ninja-build nodejs npm openssh-client openssh-server php-cli pkg-config postgresql \
        procps python3-dev python3-pip python3-psutil python3-pytest python3-pytest-xdist python3-setuptools \
        python3-venv python3-wheel r-base-core redis-server ripgrep ruby rustc screen sqlite3 strace sudo tmux \
        tomcat10-user valgrind \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/*
