# qdqtune with ONNX Runtime and OpenVINO, which measure on the processor of the host:
#
#   docker build -f docker/onnxruntime.Dockerfile -t qdqtune .
#   docker run --rm -v "$PWD:/models" --user "$(id -u):$(id -g)" qdqtune tune model.onnx --calibration-data samples.npz
#
# A container with fewer cores than the host (--cpuset-cpus, --cpus) wants --threads. Tests lint this file.
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
    && /opt/qdqtune/bin/pip install --no-cache-dir -c /wheels/requirements.lock "${wheel}[openvino]"
ENV PATH=/opt/qdqtune/bin:$PATH XDG_CACHE_HOME=/tmp/cache
USER 1000:1000
WORKDIR /models
ENTRYPOINT ["qdqtune"]
CMD ["--help"]
