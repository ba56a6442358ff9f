"""Broken: it ends the process when it is imported."""

from __future__ import annotations

import sys

sys.exit("this machine has no licence")
