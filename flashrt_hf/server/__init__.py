"""An OpenAI-compatible HTTP server in front of one model on one GPU."""
