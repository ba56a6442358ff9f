"""A checkpoint's K/V scales on disk: where they are, what they are called, what is wrong."""
