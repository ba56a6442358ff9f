"""The checks that an implementation must pass: each asks it, and compares with the definition."""
