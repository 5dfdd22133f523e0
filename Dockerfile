# megalite for GPU clusters. torch, NCCL and what belongs to them are the base image's and stay as they are.
#
#   docker build -t megalite .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 megalite megalite doctor
#
# Another base: --build-arg BASE_IMAGE=...; it needs Python 3.11 with pip, and torch 2.11 or newer.
# On a base without torch (to read configs, to prepare data): --build-arg NEEDS_TORCH=0.
# 26.07 has PyTorch 2.13, which takes FlashAttention 3 and 4 as its own, and CUDA 13.3. For
# kernels.attention=fa4 build with --build-arg ATTENTION=flash-attn-4.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.07-py3
FROM ${BASE_IMAGE}

ARG NEEDS_TORCH=1
ARG GIT_COMMIT=unknown
LABEL org.opencontainers.image.title="megalite" org.opencontainers.image.revision="${GIT_COMMIT}"

# Not a virtual environment: the base's torch is in the system's Python.
ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1

WORKDIR /opt/megalite
COPY pyproject.toml setup.py README.md LICENSE ./
COPY launch/requirements.py launch/requirements.py
ARG ATTENTION=
# What the base has is pinned to itself, so that nothing that comes can replace it.
RUN python3 launch/requirements.py pins > /tmp/pins.txt && \
    python3 launch/requirements.py needed --extra corpora,plots,tensorboard,tokenizers,wandb > /tmp/needed.txt && \
    python3 -m pip install --constraint /tmp/pins.txt --requirement /tmp/needed.txt ${ATTENTION} && \
    rm /tmp/pins.txt /tmp/needed.txt
COPY kernels kernels
COPY configs configs
COPY launch launch
COPY benchmarks benchmarks
# The bounds that the GPU gate checks with.
COPY tests/__init__.py tests/tolerances.py tests/
COPY megalite megalite
RUN env -u PIP_CONSTRAINT python3 -m pip install --no-deps . && \
    python3 launch/requirements.py check --needs-torch "${NEEDS_TORCH}" && \
    megalite version

# Any user may run it: everything is world-readable, and the home is world-writable.
RUN mkdir -p /workspace && chmod 1777 /workspace
ENV HOME=/workspace
WORKDIR /workspace
CMD ["megalite", "--help"]
