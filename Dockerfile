# megatron_npu over the torch of a base image; docs/how-to/containers.md says which images will do.
#   docker build -t megatron-image --build-arg BASE=IMAGE .
ARG BASE=nvcr.io/nvidia/pytorch:25.10-py3
FROM ${BASE}

# the base's torch fits its driver: a base without one is refused, and none is installed from here
RUN python -c "import torch"

WORKDIR /opt/megatron_npu
COPY LICENSE README.md megatron_npu_autoload.py rapidformer.py pyproject.toml setup.py ./
COPY megatron_npu megatron_npu
COPY patches patches
RUN python -m pip install --no-cache-dir ".[core,hf,plot]" nltk

# nothing that trains needs root
RUN useradd --create-home trainer
USER trainer
WORKDIR /home/trainer
CMD ["megatron-npu", "doctor"]
