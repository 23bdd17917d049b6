# An image that serves one model on one NVIDIA GPU; docs/serving.md shows how to use it.
#   docker build -t flashrt .                      kernels for every supported GPU: takes minutes
#   docker build -t flashrt --build-arg ARCH=9.0a . only for an H100 or H200
FROM python:3.12-slim-bookworm AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/flash-rt/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/flash-rt/venv

WORKDIR /opt/flash-rt/source
COPY constraints.txt ./
# torch and the compiler first: they are large and seldom change.
RUN pip install "$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)" \
 && pip install --target /opt/nvcc 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' \
    'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*'

COPY . .
RUN pip install -c constraints.txt setuptools \
 && pip install -c constraints.txt --no-build-isolation -e '.[serve]'
ARG ARCH=""
RUN CUDA_HOME="$(dirname "$(dirname "$(ls /opt/nvcc/nvidia/cu*/bin/nvcc)")")" \
    flash-rt kernels build ${ARCH:+--arch "$ARCH"}

FROM python:3.12-slim-bookworm
RUN useradd --uid 10001 --create-home flashrt \
 && install -d -o flashrt /models
COPY --from=build /opt/flash-rt /opt/flash-rt
ENV PATH=/opt/flash-rt/venv/bin:$PATH \
    HF_HOME=/models/huggingface \
    XDG_CACHE_HOME=/models/cache \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1
USER 10001
VOLUME /models
EXPOSE 8000
# Loading a model comes first; a server whose GPU has failed answers 503.
HEALTHCHECK --interval=15s --timeout=5s --start-period=15m --retries=3 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["flash-rt", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["Qwen/Qwen3-8B"]
