# docker build --tag snn .                            for CPUs
# docker build --tag snn --build-arg DEVICE=gpu .     for NVIDIA GPUs: docker run --gpus all ...
# mkdir -p runs && chmod a+w runs                     the container has a user of its own
# docker run --rm -v "$PWD/runs:/home/user/runs" snn train
FROM python:3.12-slim

# Triton and Inductor start a compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# The wheel of PyPI has CUDA and brings Triton.
ARG DEVICE=cpu
RUN pip install --no-cache-dir "torch>=2.11" \
    $(test "$DEVICE" = gpu || echo --index-url https://download.pytorch.org/whl/cpu)

ARG EXTRAS=train,events,images,nir
COPY pyproject.toml README.md LICENSE /source/
COPY spikefuse /source/spikefuse
RUN pip install --no-cache-dir "/source[$EXTRAS]" && rm -r /source

RUN useradd --create-home user
USER user
WORKDIR /home/user
ENTRYPOINT ["spikefuse"]
