"""What the server process of `ranks.py` imports once for all ranks."""

import gspo_megatron.backend.policy  # noqa: F401
