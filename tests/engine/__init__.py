"""Tests that start the real engines; see conftest.py."""
