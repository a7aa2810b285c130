"""Everything that touches Megatron-Core: the only room that imports it."""
