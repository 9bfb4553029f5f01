"""The options of a run in groups; each config of a kind of run inherits several of them."""
