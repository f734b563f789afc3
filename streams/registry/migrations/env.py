"""How Alembic runs the steps: on the connection that ``Registry.open`` hands over.

That connection holds the lock which keeps processes that start together apart, and its
transaction: a step is applied as a whole or not at all.
"""

from __future__ import annotations

from alembic import context

from streams.registry.models import Base

context.configure(
    connection=context.config.attributes.get("connection"),
    dialect_name=context.config.attributes.get("dialect"),
    target_metadata=Base.metadata,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
