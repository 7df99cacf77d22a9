"""Where text comes from: local files, the hub, a mixture of both."""
