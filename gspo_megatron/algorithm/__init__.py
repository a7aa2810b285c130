"""Pure torch and Python: losses, advantages, packing. Imports config and types only."""
