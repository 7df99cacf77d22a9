"""What any room may need: errors, the console, whole files, ranks, signals, the page's shell."""
