"""``python -m kvcache_plugin`` is ``kvcache-plugin``."""

import sys

from kvcache_plugin.cli import main

sys.exit(main())
