"""Step rules: sharpness-aware minimisation and adversarial training, as updates of the engine."""
