"""One module for each kind of hardware, each a plugin that uses only public names."""
