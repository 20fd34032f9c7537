# Image of lamb_tpu for TPUs. `lamb_tpu launch cluster` builds it from the last commit; by hand:
#   git archive HEAD | docker build --platform=linux/amd64 --tag=IMAGE -
FROM python:3.12-slim-bookworm

ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/lamb_tpu

# Install the libraries first, so that this layer stays valid if only the code changes. The build needs
# the two folders, and reads the version from lamb_tpu/__init__.py.
COPY pyproject.toml setup.py requirements.txt README.md LICENSE ./
COPY lamb_tpu/__init__.py lamb_tpu/
RUN mkdir configs experiments \
    && pip install --no-cache-dir --constraint=requirements.txt ".[train,tpu,gcs]" \
    && useradd --create-home --uid=1000 lamb_tpu

COPY . .
RUN pip install --no-cache-dir --no-deps --editable .

# Pods and hosts with TPUs start the image as root, who owns the devices; otherwise use this user.
USER lamb_tpu

CMD ["python", "-m", "lamb_tpu", "--help"]
