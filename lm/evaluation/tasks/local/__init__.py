"""Plain text read from local files."""
