# An image of the server: docker build -t draftwing . && docker run --gpus all -p 30000:30000 draftwing --model NAME
# For machines without a GPU a tenth of the size: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX
# e.g. EXTRAS=[ray] for replicas by Ray Serve
ARG EXTRAS
COPY . /source
RUN python -m venv /opt/draftwing \
 && PIP_EXTRA_INDEX_URL=$TORCH_INDEX /opt/draftwing/bin/pip install --no-cache-dir "/source$EXTRAS"

FROM python:3.12-slim
# Triton compiles a few lines of C when it starts on a GPU.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 \
 && rm -rf /var/lib/apt/lists/* && useradd --create-home --uid 1000 draftwing
COPY --from=build /opt/draftwing /opt/draftwing
ENV PATH=/opt/draftwing/bin:$PATH
USER draftwing
WORKDIR /home/draftwing
# Models and what was compiled. A volume here makes the next start faster.
RUN mkdir -p .cache
VOLUME /home/draftwing/.cache
EXPOSE 30000
ENTRYPOINT ["draftwing", "serve", "--host", "0.0.0.0", "--port", "30000"]
