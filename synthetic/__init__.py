"""The validation suite: what a sequence mixer must solve. No task is built yet."""
