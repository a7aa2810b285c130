# Image of the trainer nodes. torch, Transformer Engine and Apex are those of NVIDIA's PyTorch image and stay as they are;
# server nodes run SGLang's own image, see docs/cluster.md.
#
#   docker build -t gspo-megatron .
ARG BASE=nvcr.io/nvidia/pytorch:26.05-py3
FROM ${BASE}

# The base image pins its packages for every pip call, also the ones that it does not have.
ENV PIP_CONSTRAINT="" PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/gspo_megatron

# --no-deps, so that pip does not put a torch of its own in the place of the image's.
RUN python -c "import torch; print(torch.__version__)" >/opt/torch_version \
    && pip install --no-deps megatron-core==0.19.2 \
    && pip install transformers==5.19.0 "tokenizers>=0.22,<0.24" httpx==0.28.1 PyYAML==6.0.4 rich==15.0.0 \
       psutil==7.2.2 tensorboard==2.21.0 reasoning-gym==0.1.25 "math-verify[antlr4_13_2]==0.9.0"

COPY setup.py pyproject.toml ./
COPY gspo_megatron gspo_megatron
COPY tools tools
COPY examples examples
RUN pip install --no-deps -e . \
    && test "$(python -c 'import torch; print(torch.__version__)')" = "$(cat /opt/torch_version)" \
    && python -c "import apex, megatron.core, transformer_engine.pytorch, gspo_megatron.config"

CMD ["bash"]
