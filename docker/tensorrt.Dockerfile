# qdqtune with TensorRT from PyPI, without trtexec. The host needs NVIDIA's driver and container toolkit:
#
#   docker build -f docker/tensorrt.Dockerfile -t qdqtune-tensorrt .
#   docker run --rm --gpus 1 -v "$PWD:/models" --user "$(id -u):$(id -g)" qdqtune-tensorrt \
#     tune model.onnx --engine tensorrt --calibration-data samples.npz
#
# Tests lint this file; nobody has built it yet.
ARG BASE=python:3.12-slim
# hadolint ignore=DL3006
FROM ${BASE} AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# hadolint ignore=DL3006
FROM ${BASE}
COPY requirements.lock /wheels/
COPY --from=wheel /wheels /wheels
RUN python3 -m venv /opt/qdqtune \
    && wheel=$(echo /wheels/*.whl) \
    && /opt/qdqtune/bin/pip install --no-cache-dir -c /wheels/requirements.lock "${wheel}[tensorrt]"
ENV PATH=/opt/qdqtune/bin:$PATH XDG_CACHE_HOME=/tmp/cache \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /models
ENTRYPOINT ["qdqtune"]
CMD ["--help"]
