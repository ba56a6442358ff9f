"""``kvcache-plugin check``: what a scan of a checkpoint found, as text, JSON and a picture."""
