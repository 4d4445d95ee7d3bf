# A node in a container, on the CPU:
#     docker build -t farandole .
#     docker run -d --name node --restart on-failure:5 --stop-timeout 60 -p 4001:4001 -v farandole:/data farandole join farandole1...
#     docker exec node farandole status
# The container sees its own network alone: for invites that others can use, add --announce /ip4/PUBLIC-IP/tcp/4001.
# On a GPU: docker build --build-arg TORCH=cuda, and docker run --gpus all.
# For the same image again: docker build --build-arg BASE=python:3.11-slim@sha256:... (the digest that `docker pull` prints;
# none is written here, since one that is not updated keeps the faults of that day's Debian).
# A relay and two nodes on one machine: compose.yaml.
# --stop-timeout, since leaving in good order takes longer than the 10 s that Docker waits of its own accord.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
# fastecdsa, of libp2p's, comes as source.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libgmp-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
ARG TORCH=cpu
# Each package comes from one index and nowhere else. Only torch for the CPU has no hash here: PyPI does not have it.
RUN python -m venv /opt/farandole \
 && install() { /opt/farandole/bin/pip install --no-cache-dir --no-deps "$@"; } \
 && PYPI="--index-url https://pypi.org/simple --require-hashes" \
 && install $PYPI -r requirements.lock \
 && if [ "$TORCH" = cuda ]; then install $PYPI -r requirements-cuda.lock; \
    else install --index-url "https://download.pytorch.org/whl/$TORCH" -c constraints.txt torch; fi \
 && install --no-index --no-build-isolation .

FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends libgmp10 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home farandole && install -d -o farandole -g farandole -m 700 /data
COPY --from=build /opt/farandole /opt/farandole
ENV PATH=/opt/farandole/bin:$PATH PYTHONUNBUFFERED=1 FARANDOLE_HOME=/data FARANDOLE_PORT=4001
USER farandole
WORKDIR /data
VOLUME /data
EXPOSE 4001
# `status` is answered by the node itself, and fails where none runs.
HEALTHCHECK --interval=60s --timeout=20s --start-period=120s CMD ["farandole", "status"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["farandole"]
CMD ["join"]
