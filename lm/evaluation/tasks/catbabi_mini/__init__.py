"""A small CatbAbI-style question-answering task on stories written here."""
