"""``python -m streams.cli`` is ``clawstream``."""

from __future__ import annotations

import sys

from streams.cli import main

sys.exit(main())
