"""One module for each engine, and one table of every engine symbol that we touch."""
