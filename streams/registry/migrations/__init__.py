"""The registry's schema, step by step (Alembic). Applied by ``Registry.open``."""
