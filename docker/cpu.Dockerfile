# The server for machines without a GPU: docker build -f docker/cpu.Dockerfile -t draftwing:cpu .
# docker run -p 30000:30000 -v draftwing:/home/draftwing/.cache draftwing:cpu smollm2
FROM python:3.12.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /source
# e.g. EXTRAS=[otel]
ARG EXTRAS
# torch first: from its own index the build for CPUs alone, a tenth of the other's size.
RUN python -m venv /opt/draftwing \
 && /opt/draftwing/bin/pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
 && /opt/draftwing/bin/pip install --no-cache-dir "/source$EXTRAS"

FROM python:3.12.12-slim-bookworm
RUN useradd --create-home --uid 1000 draftwing
COPY --from=build /opt/draftwing /opt/draftwing
# Options, which a command line overrules: DRAFTWING_... is any of them.
ENV PATH=/opt/draftwing/bin:$PATH DRAFTWING_HOST=0.0.0.0 PYTHONMALLOC=malloc
USER draftwing
WORKDIR /home/draftwing
# Models and measurements. A volume here makes the next start faster.
RUN mkdir -p .cache
VOLUME /home/draftwing/.cache
EXPOSE 30000
# A model that is fetched first may take long to load.
HEALTHCHECK --start-period=30m --interval=10s --timeout=5s \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:30000/liveness', timeout=4)"]
ENTRYPOINT ["draftwing", "serve"]
