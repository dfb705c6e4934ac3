# cram in a container; flows/README.md, "Container", says how to run it.
# DEVICE: cuda (PyPI's torch, which has CUDA in it; the host needs NVIDIA's driver and container toolkit), or cpu.
FROM debian:bookworm-slim
ARG DEVICE=cuda

# g++ and Python's headers are for torch.compile
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates g++ python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /cram
ENV PATH=/cram/.venv/bin:$PATH
RUN python3 -m venv .venv

# the packages first, so that a change of cram's code doesn't download them again
COPY pyproject.toml ./
RUN python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
    >requirements.txt
RUN if [ "$DEVICE" = cpu ]; then export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu; fi \
 && pip install --no-cache-dir --use-pep517 --requirement requirements.txt

COPY . ./
RUN pip install --no-cache-dir --no-deps --editable .

# any user may run it (docker run --user), with the store and the caches of downloads in the volume
ENV CRAM_ARTIFACTS=/artifacts HF_HOME=/artifacts/.huggingface HOME=/tmp USER=cram PREFECT_HOME=/tmp/prefect
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["cram", "--help"]
