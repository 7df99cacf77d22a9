"""Small CatbAbI-style question answering on stories that come with the package."""
