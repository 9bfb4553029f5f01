"""The options of a fine-tuning run in groups; `vtk.training.config.FinetuneConfig` is all of them."""
