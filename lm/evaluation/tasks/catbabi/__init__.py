"""CatbAbI on the real bAbI stories, a task of lm-eval for each of bAbI's twenty."""
