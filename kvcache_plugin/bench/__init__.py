"""What ``kvcache-plugin bench`` measures, and how it is said."""
