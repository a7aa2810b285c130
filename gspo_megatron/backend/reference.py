"""The reference policy: the weights that a run started from, in host memory, without optimizer state."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


class ReferenceWeights:
    """Copies of this rank's `params`, taken on construction; costs their size in host memory and nothing on the device.

    `in_place` exchanges them with the policy's weights and back, bit for bit, so that the policy's own forward pass is
    the reference's, on any layout. The optimizer's master weights are not touched; nothing may be updated meanwhile.
    """

    def __init__(self, params: Mapping[str, Tensor]):
        self._params = params
        self._held = {name: param.detach().to("cpu", copy=True) for name, param in params.items()}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The parameters are the reference's inside, and the policy's again after it, also after an error."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, param in self._params.items():
            current = param.detach().to("cpu", copy=True)
            param.copy_(self._held[name])
            self._held[name] = current
