"""Verification that every export passes before it is kept."""
