"""The validation suite: what an expressive sequence mixer must solve."""
