"""What a model makes of one text or word: measured, then drawn as a page or in a terminal."""
