# One image, every role. Ports, model and peer come from a TOML file or PRFAAS_* variables:
#   docker build -t prfaas .
#   docker network create kv && docker volume create models
#   docker run -d --network kv --name prefill -v models:/models \
#       -e PRFAAS_CONFIG=/etc/prfaas/prefill.toml -e HEALTH_PORT=8100 prfaas
#   docker run -d --network kv --name pd -v models:/models -p 127.0.0.1:8000:8000 prfaas
# A whole fleet with its scheduler: docker compose -f configs/compose.yaml up
# The KV channel between the two is not encrypted: keep that network private.
#
# PyPI's torch for Linux brings CUDA libraries along. For an image without them give pip an index of
# CPU builds: --build-arg PIP_OPTIONS="--extra-index-url ..."
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY prfaas prfaas
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
ARG PIP_OPTIONS=""
RUN useradd --create-home --uid 10001 prfaas && install -d -o prfaas -m 0700 /models
COPY --from=build /wheels /wheels
COPY configs /etc/prfaas
RUN pip install --no-cache-dir $PIP_OPTIONS -c /etc/prfaas/constraints.txt /wheels/*.whl && rm -r /wheels
USER prfaas
ENV PRFAAS_MODELS_DIR=/models \
    PRFAAS_CONFIG=/etc/prfaas/pd.toml \
    HEALTH_PORT=8000
VOLUME /models
EXPOSE 8000 8100 8200
# Alive while it loads, too; /ready says whether it takes requests.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"HEALTH_PORT\"]}/health', timeout=4)"]
ENTRYPOINT ["prfaas"]
CMD ["serve"]
