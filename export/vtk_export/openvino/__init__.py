"""OpenVINO models (IR): written, verified in the precisions of this processor, described."""
