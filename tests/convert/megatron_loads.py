"""What trainer ranks run in these tests: models filled by Megatron's own loader, and by this project's from HF
files."""

from pathlib import Path

import torch
from megatron.core import dist_checkpointing

from gspo_megatron.backend.mesh import Mesh
from gspo_megatron.backend.model import build_model
from gspo_megatron.backend.parameters import global_parameters, place_of_rank
from gspo_megatron.backend.policy import Policy
from gspo_megatron.config import Config, MegatronConfig, ModelConfig, ParallelConfig, TrainConfig
from gspo_megatron.weights.families import FAMILIES
from gspo_megatron.weights.hf_files import HFReader, read_hf_config
from gspo_megatron.weights.load import load_parameters
from gspo_megatron.weights.megatron_files import MegatronReader
from gspo_megatron.weights.plan import blocks_of
from gspo_megatron.weights.rules import ModelShape
from tests.backend.checkpoint_runs import go_on, make_policy


def differences(cases: list[tuple[str, str]], layout: dict, transformer: dict) -> list[list[str]]:
    """For each (HF directory, Megatron directory): names of parameters that Megatron's own loader fills otherwise than
    `load_parameters` from HF files, and those that this project's reader of Megatron files does."""
    mesh, results = Mesh.create(ParallelConfig(**layout), seed=1, timeout_s=60), []
    for hf_directory, directory in cases:
        hf = read_hf_config(hf_directory)
        family, shape = FAMILIES[hf["architectures"][0]], ModelShape.from_hf(hf)
        config = Config(parallel=mesh.parallel, train=TrainConfig(dtype="fp32"))
        config = Config(**{**vars(config), "megatron": MegatronConfig(transformer=transformer)})
        chunks = build_model(hf, config, mesh)
        place = place_of_rank(mesh, chunks)
        blocks, params = blocks_of(family, shape, place), global_parameters(chunks, place)
        load_parameters(params, blocks, HFReader(hf_directory))
        expected = {name: param.detach().clone() for name, param in params.items()}
        wrong = []
        for loader in ("megatron", "own"):
            with torch.no_grad():
                for param in params.values():
                    param.fill_(float("nan"))
            if loader == "own":
                load_parameters(params, blocks, MegatronReader(directory, family, shape))
            else:
                load_as_megatron(chunks, directory)
            wrong += [f"{loader}: {name}" for name, param in params.items() if not _equal(param, expected[name], shape)]
        results.append([f"{len(params)} parameters", *wrong])
    mesh.close()
    return results


def load_as_megatron(chunks: list, directory: str) -> None:
    """As Megatron-LM does: by the shards that GPTModel names."""
    shards = {f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(chunks)}
    loaded = dist_checkpointing.load(shards, directory)
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{index}"])


def _equal(param: torch.Tensor, expected: torch.Tensor, shape: ModelShape) -> bool:
    """Rows that pad a vocabulary are nobody's: Megatron leaves them as they were made."""
    filled = ~param.isnan()
    padding = int((~filled).sum())
    assert padding == 0 or padding % param.shape[-1] == 0 and (expected[~filled] == 0).all()
    return padding < param.numel() and torch.equal(param[filled], expected[filled])


def policy_tensors(hf_directory: str, directory: str, layout: dict) -> dict:
    """HF tensors of a policy that starts from Megatron files, and what it does not read from the HF directory."""
    mesh = Mesh.create(ParallelConfig(**layout), seed=1, timeout_s=60)
    model = ModelConfig(hf=hf_directory, megatron=directory)
    policy = Policy(Config(model=model, parallel=mesh.parallel, train=TrainConfig(dtype="fp32")), mesh)
    tensors = {name: tensor.clone().numpy() for name, tensor in policy.hf_tensors()}
    mesh.close()
    return tensors


def save_policies(cases: list[tuple[str, str]], layout: dict, dtype: str) -> list[dict]:
    """For each (HF directory, directory to write) a run's checkpoint of a policy after an update; its HF tensors
    then."""
    mesh, results = Mesh.create(ParallelConfig(**layout), seed=1, timeout_s=60), []
    for hf_directory, directory in cases:
        policy = make_policy(mesh, hf_directory, dtype)
        results.append(go_on(policy, mesh, [1])["weights"])
        if mesh.rank == 0:
            Path(directory).mkdir(parents=True)
        mesh.barrier("the directory")
        policy.save(Path(directory))
    mesh.close()
    return results
