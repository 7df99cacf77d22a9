"""CatbAbI on the real bAbI stories: one lm-eval task for each of the twenty bAbI tasks."""
