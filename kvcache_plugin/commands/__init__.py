"""The commands of ``kvcache-plugin``: a module for each, of its name, imported when it is run."""
