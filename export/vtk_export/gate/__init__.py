"""The gate: an exported file against torch, before it is kept."""
