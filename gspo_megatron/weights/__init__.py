"""Names and shapes of weights on both sides, and what moves them: HF files, Megatron shards, buckets for engines."""
