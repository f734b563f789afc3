"""Where the files that are not code lie, in a checkout and in an installed wheel alike."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def resource_path(relative: str) -> Path:
    """The path of a shipped file or folder, for example ``schemas/avro``.

    Raises:
        FileNotFoundError: It is in neither place; the installation is broken.
    """
    for root in (_PACKAGE / "resources", _PACKAGE.parent):
        if (root / relative).exists():
            return root / relative
    raise FileNotFoundError(f"{relative} is missing from this installation of clawstream")
