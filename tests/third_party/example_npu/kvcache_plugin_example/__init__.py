"""Example implementations for kvcache-plugin: a template for those of real hardware."""
