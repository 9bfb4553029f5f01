"""The options of a run in groups; `vtk.training.config.FinetuneConfig` and its like are several of them each."""
