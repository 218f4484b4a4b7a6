# A worker of a Prefect work pool. Build it in a clone of the repository:
#   docker build --file examples/worker.Dockerfile --tag leash-worker .
#   docker run --env PREFECT_API_URL --env PREFECT_API_AUTH_STRING --env MLFLOW_TRACKING_URI --env REPOSITORY=https://… --volume leash:/leash leash-worker
# The volume keeps the clone and DVC's cache. Credentials of git and of the DVC remote come as further variables or mounts.
# With CUDA: --gpus all, and an image of NVIDIA's CUDA runtime in the place of python:3.11-slim. Built in no test.
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /opt/leash
COPY pyproject.toml constraints.txt Makefile README.md LICENSE ./
COPY flows flows
COPY tasks tasks
COPY rlhf_core rlhf_core
RUN make setup TORCH_INDEX=${TORCH_INDEX} && .venv/bin/pip install --no-cache-dir --constraint constraints.txt '.[s3]'
ENV PATH=/opt/leash/.venv/bin:$PATH POOL=leash LIMIT=1 LEASH_HOME=/leash
WORKDIR /leash
CMD (test -d .git || git clone "$REPOSITORY" .) && exec prefect worker start --pool "$POOL" --type process --limit "$LIMIT"
