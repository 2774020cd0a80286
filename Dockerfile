# Three images from one file. None of them runs as root; what they write lies in /data, the home of their user.
#   docker build --target coordinator -t pmtrain:coordinator .    leads a run: no torch
#   docker build --target peer-cuda   -t pmtrain:peer-cuda .      joins with an NVIDIA card
#   docker build --target peer-cpu    -t pmtrain:peer-cpu .       joins without one; the demo and all other commands
# docs/services.md and docs/in-the-cloud.md say how they are run, and what of this file was built and what was not.
ARG PYTHON=docker.io/library/python:3.12-slim

# Packages go into an environment without pip, which is all that the images take over. Their lists are complete and have
# hashes: pip resolves nothing. A coordinator's are a part of a peer's.
FROM ${PYTHON} AS packages
ENV VIRTUAL_ENV=/opt/pmtrain PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv --without-pip "$VIRTUAL_ENV"
COPY requirements requirements
RUN pip --python "$VIRTUAL_ENV/bin/python3" install --no-deps --require-hashes -r requirements/coordinator.txt

FROM packages AS wheel
COPY pyproject.toml README.md LICENSE ./
COPY protomodels_cli protomodels_cli
RUN pip --python "$VIRTUAL_ENV/bin/python3" wheel --no-deps --no-build-isolation --wheel-dir dist .

FROM packages AS coordinator-packages
COPY --from=wheel /src/dist dist
RUN pip --python "$VIRTUAL_ENV/bin/python3" install --no-deps dist/*.whl

FROM packages AS cuda-packages
RUN pip --python "$VIRTUAL_ENV/bin/python3" install --no-deps --require-hashes \
      -r requirements/peer.txt -r requirements/cuda.txt
COPY --from=wheel /src/dist dist
RUN pip --python "$VIRTUAL_ENV/bin/python3" install --no-deps dist/*.whl

# The CPU build comes from PyTorch's own index: PyPI's Linux build brings gigabytes of CUDA along. torch.txt need not have
# the hash of that build, so it comes first and without one; then the list finds its torch installed.
FROM packages AS cpu-packages
RUN pip --python "$VIRTUAL_ENV/bin/python3" install --no-deps --index-url https://download.pytorch.org/whl/cpu \
      "$(grep -o '^torch==[^ ]*' requirements/torch.txt)"
RUN pip --python "$VIRTUAL_ENV/bin/python3" install --no-deps --require-hashes -r requirements/peer.txt
COPY --from=wheel /src/dist dist
RUN pip --python "$VIRTUAL_ENV/bin/python3" install --no-deps dist/*.whl

FROM ${PYTHON} AS runtime
ENV PATH=/opt/pmtrain/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --home-dir /data --create-home --shell /usr/sbin/nologin pmtrain
USER 10001
WORKDIR /data
VOLUME /data
ENTRYPOINT ["pmtrain"]
CMD ["--help"]

# Healthy: its door takes connections. It opens once the text is tokenised.
FROM runtime AS coordinator
COPY --from=coordinator-packages /opt/pmtrain /opt/pmtrain
EXPOSE 7420
HEALTHCHECK --interval=30s --timeout=10s --start-period=30m \
  CMD ["python3", "-c", "import socket; socket.create_connection(('127.0.0.1', 7420), 5)"]

# Healthy: it has a connection, as a peer that has joined always does. One that is not healthy is trying to reconnect
# and has its stage in memory: do not restart it for that.
FROM runtime AS peer-cuda
COPY --from=cuda-packages /opt/pmtrain /opt/pmtrain
EXPOSE 7421
HEALTHCHECK --interval=30s --timeout=10s --start-period=5m \
  CMD ["python3", "-c", "import psutil, sys; sys.exit(not any(c.status == 'ESTABLISHED' for p in psutil.process_iter() for c in p.net_connections('tcp')))"]

FROM runtime AS peer-cpu
COPY --from=cpu-packages /opt/pmtrain /opt/pmtrain
EXPOSE 7421
HEALTHCHECK --interval=30s --timeout=10s --start-period=5m \
  CMD ["python3", "-c", "import psutil, sys; sys.exit(not any(c.status == 'ESTABLISHED' for p in psutil.process_iter() for c in p.net_connections('tcp')))"]
