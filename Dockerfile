# A node in a container, on the CPU:
#     docker build -t farandole .
#     docker run -d --name node --restart on-failure:5 --stop-timeout 60 -p 4001:4001 -v farandole:/data farandole join farandole1...
#     docker exec node farandole status
# For models of transformers, Parquet or --stream: docker build --build-arg EXTRAS=tokenizers,hf,data
# On a GPU: docker build --build-arg TORCH_INDEX=https://pypi.org/simple (whose PyTorch has CUDA), and docker run --gpus all.
# --stop-timeout, since leaving in good order takes longer than the 10 s that Docker waits of its own accord.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
# fastecdsa, of libp2p's, comes as source.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libgmp-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=tokenizers
RUN python -m venv /opt/farandole \
 && /opt/farandole/bin/pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c constraints.txt ".[$EXTRAS]"

FROM python:${PYTHON}-slim
RUN apt-get update && apt-get install -y --no-install-recommends libgmp10 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home farandole && install -d -o farandole -g farandole -m 700 /data
COPY --from=build /opt/farandole /opt/farandole
ENV PATH=/opt/farandole/bin:$PATH PYTHONUNBUFFERED=1 FARANDOLE_HOME=/data FARANDOLE_LISTEN=/ip4/0.0.0.0/tcp/4001
USER farandole
WORKDIR /data
VOLUME /data
EXPOSE 4001
# `status` is answered by the node itself, and fails where none runs.
HEALTHCHECK --interval=60s --timeout=20s --start-period=120s CMD ["farandole", "status"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["farandole"]
CMD ["join"]
