"""From a configuration to a trained run: model, DeepSpeed, optimizer, loop."""
