"""Export to a model repository of Triton Inference Server; `served` has the files that run in the server."""
