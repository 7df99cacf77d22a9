"""The YAML: its schema, how it is read, and what a resumed run may change."""
