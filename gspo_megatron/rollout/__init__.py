"""SGLang servers: starting them, sampling from them, and sending them weights."""
