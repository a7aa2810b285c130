"""The real SGLang server on a plain x86 CPU: `python -m gspo_megatron.rollout.sglang_cpu --model-path DIR ...`

SGLang's CPU path expects kernels that PyPI has no wheels for, and uses them only where the processor has AMX tiles and
the kernels registered themselves. Stand-ins for the names it imports are enough: torch computes instead. The stand-ins
are installed when this module is imported, since SGLang's spawned processes import the main module again.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
# a model directory is all that is served: no look-ups on the network
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import torch  # noqa: E402

from gspo_megatron.rollout.torchvision_operators import ensure_torchvision_operators  # noqa: E402


class _KernelStandIns(types.ModuleType):
    """Stands for `sgl_kernel`: any name can be imported, and says what is missing when called."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args, **kwargs):
            raise RuntimeError(
                f"sgl_kernel.{name} was called, and this machine has no CPU build of sgl_kernel; choose other server"
                " flags (--attention-backend torch_native --sampling-backend pytorch), or a machine with a GPU"
            )

        missing.__name__ = name
        return missing


def _has_cpu_kernels() -> bool:
    """Whether an installed `sgl_kernel` is a CPU build; a CUDA build fails to load here or lacks these operators."""
    if importlib.util.find_spec("sgl_kernel") is None:
        return False
    try:
        importlib.import_module("sgl_kernel")
    except Exception as error:
        # whatever a CUDA build raises without a driver (ImportError, OSError, RuntimeError): it is of no use here
        print(f"sgl_kernel is installed and not usable on this machine, going on without: {error}", file=sys.stderr)
        return False
    return hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


def install_stand_ins() -> None:
    """Make SGLang importable on this machine; does nothing that is not needed, and nothing twice."""
    ensure_torchvision_operators()
    if isinstance(sys.modules.get("sgl_kernel"), _KernelStandIns) or _has_cpu_kernels():
        return
    for name in [name for name in sys.modules if name.split(".")[0] == "sgl_kernel"]:
        del sys.modules[name]
    stand_ins = _KernelStandIns("sgl_kernel")
    stand_ins.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    stand_ins.__path__ = []
    sys.modules["sgl_kernel"] = stand_ins


install_stand_ins()


def absorb_latent_attention() -> None:
    """Have multi-latent attention (DeepSeek) work on the cached latents, in prefill too.

    SGLang's plain torch attention reads keys and values from the cache, which holds latents: handed projected heads, as
    its dispatch does in prefill, it takes latents for values, and fails or answers wrongly.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


absorb_latent_attention()


def gate_shared_experts_by_torch() -> None:
    """Qwen2-MoE's gate on its shared expert is a Triton kernel, on a CPU too; must run before its model is imported."""
    from sglang.kernels.ops.elementwise import elementwise

    def add_gated(hidden_states, gate_weight, shared_output, final_hidden_states) -> None:
        gate = torch.sigmoid(hidden_states.float() @ gate_weight.float())[:, None]
        final_hidden_states.copy_(final_hidden_states.float() + gate * shared_output.float())

    elementwise.fused_gate_sigmoid_mul_add = add_gated


gate_shared_experts_by_torch()


def main(arguments: list[str]) -> None:
    """Serve until the process is told to stop; takes the flags of `sglang.launch_server`."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
