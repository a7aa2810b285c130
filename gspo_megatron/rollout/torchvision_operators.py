"""Lets `import torchvision` succeed where its compiled extension does not load.

PyPI's torchvision is built for the CUDA torch. Beside a CPU build of torch its library of operators does not load, and
then the import fails on operators that nobody here calls; transformers' models and SGLang both import it.
"""

import importlib
import importlib.util

import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_library: torch.library.Library | None = None


def ensure_torchvision_operators() -> None:
    """Declare (without kernels) the operators that torchvision's import asks for, unless it brings them itself.

    Does nothing where torchvision is missing or sound. An import that fails for another reason raises as it would.
    """
    global _library
    if _library is not None or importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    else:
        return
    # the object has to live as long as the process: its end takes the declarations away
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            _library.define(schema)
    importlib.import_module("torchvision")
