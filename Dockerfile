# The demo, guarded, as an image. Over an engine's image instead, the same canary beside that engine:
#
#   docker build -t kv-canary .
#   docker build -t vllm-canary --build-arg BASE=vllm/vllm-openai:latest --build-arg EXTRAS= .
#   docker run vllm-canary vllm serve ...
#
# Where packages come from is pip's business: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS are taken as build arguments,
# and TORCH says which torch, such as the CPU build of an index that has one: --build-arg TORCH=torch==2.13.0+cpu
ARG BASE=python:3.12-slim

FROM ${BASE} AS wheel
USER root
WORKDIR /source
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
COPY pyproject.toml README.md LICENSE ./
COPY daemon daemon
COPY adapters adapters
# pip as a module: it has no certain place, and an environment made by uv has none before ensurepip
RUN python3 -m pip --version || python3 -m ensurepip
RUN python3 -m pip wheel --quiet --no-deps --wheel-dir /wheels .

FROM ${BASE}
USER root
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG TORCH=torch
ARG EXTRAS=demo
# What the base brought stays as it is: if that cannot be, the build fails, not the engine. torch has a layer of its own, so that
# a change of ours does not fetch it anew. PIP_BREAK_SYSTEM_PACKAGES: in an image, the system's Python is ours.
RUN python3 -m pip --version || python3 -m ensurepip; \
    python3 -m pip list --quiet --format=freeze >/brought.txt && \
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --no-cache-dir --root-user-action ignore \
        --constraint /brought.txt "$TORCH"
COPY --from=wheel /wheels /wheels
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --no-cache-dir --root-user-action ignore \
        --constraint /brought.txt "$TORCH" "$(echo /wheels/*.whl)${EXTRAS:+[$EXTRAS]}" && \
    rm -r /wheels /brought.txt
COPY deploy/entrypoint.sh /usr/local/bin/kv-canary-entrypoint

# Everything that is written goes below /tmp: with a read-only root, mount a tmpfs there. Without one the kernels are compiled
# anew at each start, which the log says. USER: torch asks for a name, and the uid has no entry in /etc/passwd.
ENV KV_CANARY_HOST=0.0.0.0 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    USER=kv-canary \
    NUMBA_CACHE_DIR=/tmp/kv-canary/numba \
    TRITON_CACHE_DIR=/tmp/kv-canary/triton \
    TORCHINDUCTOR_CACHE_DIR=/tmp/kv-canary/inductor
WORKDIR /tmp
USER 10470:10470
EXPOSE 10470

# Alive and ticking, not "no mismatch": restarting a server that found one would throw the evidence away.
HEALTHCHECK --interval=15s --timeout=5s --start-period=120s --retries=3 CMD ["python3", "-c", \
    "import os, urllib.request; urllib.request.urlopen(f\"http://127.0.0.1:{os.environ.get('KV_CANARY_PORT') or 10470}/healthz\", timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["kv-canary-entrypoint"]
CMD ["kv-canary", "demo"]

ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="KV Canary" \
    org.opencontainers.image.description="Knows, in production, that the KV cache of an LLM server is right." \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
